"""Eight short texts to audit a model on, of different kinds, each long enough to be cut to forty tokens."""

PROMPTS = (
    "The river had risen in the night, and by morning the lower field was a sheet of brown water in which the fence "
    "posts stood like people waiting. My brother walked down to look for the boat while I counted the sheep.",
    "A prime number is a whole number greater than one that has no divisors other than one and itself. There are "
    "infinitely many of them, and the oldest proof of this takes only a few lines: suppose there were a last one.",
    "Prices of wheat and copper fell for the third week in a row on Thursday, as traders weighed reports of a good "
    "harvest against the prospect of higher interest rates. Analysts had expected a smaller decline, and some said so.",
    "To make the dough, mix four cups of flour with two teaspoons of salt and a packet of dry yeast. Add warm water a "
    "little at a time, stirring until it comes away from the bowl, then cover it and let it rest for an hour.",
    "Fellow citizens, the year that is closing has brought to our country peace abroad and, with few exceptions, "
    "prosperity at home. The treasury holds more than it did, the harvests were good, and the public debt was reduced.",
    "The function takes a list of numbers and returns the largest sum of any run of neighbours. It keeps two values "
    "while it reads the list once: the best sum so far, and the best sum of a run that ends at the current place.",
    "When a cell divides, each of its chromosomes has been copied, and the two copies are pulled to opposite ends by "
    "fibres that shorten. If this goes wrong, one daughter cell receives too many chromosomes and the other too few.",
    "She opened the letter at the window because the light was better there. It was from the lawyer in Lisbon, and it "
    "said in three careful paragraphs that the house was hers, that the roof was not sound, and that he was sorry.",
)
