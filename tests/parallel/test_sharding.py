"""Meshes, rules and the one property that matters: a step on many devices is a step on one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from plga_jax.models.pldr import PLDR
from plga_jax.models.pldr_config import PLDRConfig
from plga_jax.parallel.mesh import AXES, make_mesh, parse_mesh
from plga_jax.parallel.sharding import (
    DATA_PARALLEL,
    FSDP,
    ShardingRules,
    batch_sharding,
    batch_ways,
    param_shardings,
    replicated,
)
from plga_jax.train.losses import DagCoefficients
from plga_jax.train.objectives import next_token_objective
from plga_jax.train.optim import OptimConfig, make_optimizer
from plga_jax.train.step import TrainState, make_train_step
from tests.toy_model import Toy, ToyBatches, ToyConfig, toy_objective

TX = make_optimizer(OptimConfig(learning_rate=0.02, warmup_steps=1, total_steps=9))
MESHES = [({"data": 8}, DATA_PARALLEL), ({"fsdp": 8}, FSDP), ({"data": 2, "fsdp": 4}, FSDP)]


def train(model, objective, batches, *, mesh=None, rules=None, accumulation=1, tx=TX):
    """Metrics of an update per batch and the state after them; the first rate of `TX` is 0."""
    state = TrainState.init(model, tx, mesh=mesh, rules=rules)
    shardings = None if mesh is None else param_shardings(state, mesh, rules)
    step = make_train_step(objective, tx, shardings=shardings, accumulation=accumulation)
    metrics = []
    for batch in batches:
        if mesh is not None:
            batch = jax.device_put(batch, batch_sharding(mesh, rules))
        state, values = step(state, batch)
        metrics.append(values)
    return metrics, state


def check_equal(many, one, *, tolerance):
    (metrics, state), (expected, reference) = many, one
    chex.assert_trees_all_close(metrics, expected, rtol=tolerance, atol=tolerance)
    chex.assert_trees_all_close(state.params, reference.params, rtol=tolerance, atol=tolerance)
    chex.assert_trees_all_close(state.opt_state, reference.opt_state, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def toy_reference():
    """A model, two batches and what two steps on one device make of them."""
    model, stream = Toy(ToyConfig(), rngs=nnx.Rngs(0)), ToyBatches()
    batches = [next(stream), next(stream)]
    return model, batches, train(model, toy_objective, batches)


class TestOneDeviceIsTheReference:
    @pytest.mark.parametrize(("shape", "rules"), MESHES)
    def test_float32(self, toy_reference, shape, rules):
        model, batches, one = toy_reference
        mesh = make_mesh(shape)
        many = train(model, toy_objective, batches, mesh=mesh, rules=rules)
        check_equal(many, one, tolerance=1e-5)
        moved = optax.tree.norm(optax.tree.sub(many[1].params, nnx.split(model, nnx.Param, ...)[1]))
        assert moved > 0.1
        # The state comes out as it went in: nothing drifts to another placement.
        wanted = param_shardings(many[1], mesh, rules)
        for array, sharding in zip(jax.tree.leaves(many[1]), jax.tree.leaves(wanted), strict=True):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)

    def test_float64_in_microbatches(self, x64):
        """Rows are dealt out, so each of the two microbatches has rows on every device."""
        stream = ToyBatches(rows=16)
        batches, mesh = [next(stream), next(stream)], make_mesh({"data": 2, "fsdp": 4})
        model = Toy(ToyConfig(dtype="float64"), rngs=nnx.Rngs(0))
        one = train(model, toy_objective, batches)
        many = train(model, toy_objective, batches, mesh=mesh, rules=FSDP, accumulation=2)
        check_equal(many, one, tolerance=1e-10)

    def test_pldr(self):
        self.check_pldr("float32", *MESHES[2], coefficients=None, tolerance=1e-5)

    @pytest.mark.parametrize(("shape", "rules"), MESHES)
    def test_pldr_in_float64_with_dag_loss(self, x64, shape, rules):
        coefficients = DagCoefficients(A_LM=0.05, G_LM=0.05)
        self.check_pldr("float64", shape, rules, coefficients=coefficients, tolerance=1e-10)

    def check_pldr(self, dtype, shape, rules, *, coefficients, tolerance):
        sizes = {"vocab_size": 16, "num_layers": 2, "num_heads": 2, "head_width": 4}
        config = PLDRConfig(**sizes, residual_units=1, blocks_per_unit=1, param_dtype=dtype, compute_dtype=dtype)
        model = PLDR(config, rngs=nnx.Rngs(0))
        objective = next_token_objective(coefficients)
        batches = [next(ToyBatches())]
        # Plain descent shows a wrong gradient as it is, and compiles faster than AdamW.
        tx = optax.sgd(0.1)
        one = train(model, objective, batches, tx=tx)
        many = train(model, objective, batches, mesh=make_mesh(shape), rules=rules, tx=tx)
        check_equal(many, one, tolerance=tolerance)


class TestRules:
    def test_specs_of_every_weight(self):
        mesh = make_mesh({"data": 2, "fsdp": 4})
        state = TrainState.init(Toy(ToyConfig(), rngs=nnx.Rngs(0)), TX)
        placed = param_shardings(state, mesh, FSDP)
        expected = {
            "embedding": P("fsdp", None),
            "up": P(None, "fsdp", None),  # The stacked layers come first and stay whole.
            "down": P(None, "fsdp", None),
            "head": P("fsdp", None),
            "bias": P("fsdp"),
        }
        moments = placed.opt_state[0].inner[1]
        for tree in (placed.params, moments.mu, moments.nu):
            for name, spec in expected.items():
                sharding, ndim = tree[name].get_value(), state.params[name].ndim
                assert sharding.is_equivalent_to(NamedSharding(mesh, spec), ndim), name
        whole = NamedSharding(mesh, P())
        assert placed.step == placed.key == moments.count == whole
        assert placed.rest["scale"].get_value() == whole
        assert jax.tree.structure(placed) == jax.tree.structure(state)

    def split(self, axes, shape, rules, mesh):
        tree = {"w": nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes)}
        return param_shardings(tree, mesh, rules)["w"].get_value().spec, list(replicated(tree, mesh, rules))

    def test_first_axis_that_divides_takes_it(self):
        mesh = make_mesh({"fsdp": 4, "tensor": 2})
        assert self.split(("D", "F"), (8, 8), FSDP, mesh) == (P("fsdp", None), [])
        assert self.split(("D", "F"), (6, 8), FSDP, mesh) == (P(None, "fsdp"), [])
        spec, report = self.split(("D", "F"), (6, 7), FSDP, mesh)
        assert spec == P(None, None)
        assert report == ["w [D=6, F=7] is not divided by fsdp=4: every device holds it"]

    def test_several_mesh_axes_on_one_axis(self):
        rules = ShardingRules(D=("fsdp", "tensor"), F="tensor")
        mesh = make_mesh({"fsdp": 4, "tensor": 2})
        assert self.split(("D", "F"), (8, 8), rules, mesh)[0] == P(("fsdp", "tensor"), None)
        # 4 rows leave no room for "tensor" on D, so F may have it.
        assert self.split(("D", "F"), (4, 8), rules, mesh)[0] == P(("fsdp",), "tensor")

    def test_merged_axes_go_by_their_first_letter(self):
        mesh = make_mesh({"tensor": 8})
        assert self.split(("D", "NH"), (8, 16), ShardingRules(N="tensor"), mesh)[0] == P(None, "tensor")

    def test_parameters_without_letters_are_whole(self):
        assert self.split((), (8, 8), FSDP, make_mesh({"fsdp": 8}))[0] == P(None, None)

    def test_batch(self):
        mesh = make_mesh({"data": 2, "fsdp": 4})
        assert batch_ways(mesh, FSDP) == 8 and batch_ways(mesh, ShardingRules()) == 1
        placed = jax.device_put(np.zeros((16, 3)), batch_sharding(mesh, FSDP))
        assert {s.data.shape for s in placed.addressable_shards} == {(2, 3)}

    def test_bad_rules(self):
        with pytest.raises(ValueError, match="'model' is not a mesh axis"):
            ShardingRules(D="model")
        with pytest.raises(ValueError, match="names one mesh axis twice"):
            ShardingRules(D=("fsdp", "fsdp"))
        with pytest.raises(ValueError, match="axis letter 'Q' has no rule"):
            self.split(("Q",), (8,), FSDP, make_mesh())


class TestMesh:
    def test_all_axes_are_there_and_auto(self):
        mesh = make_mesh({"tensor": 2, "data": -1})
        assert mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}
        assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "seq": 1, "tensor": 2, "expert": 1}
        assert make_mesh().shape["data"] == 8
        assert make_mesh({"seq": 2}, jax.devices()[:2]).size == 2

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ({"data": 3}, "data=3 needs 3 devices, 8 are there"),
            ({"data": 3, "fsdp": -1}, "8 devices cannot be divided by 3"),
            ({"data": -1, "fsdp": -1}, "only one mesh axis can be inferred by -1, got data and fsdp"),
            ({"data": 0}, "data=0: a size is at least 1"),
            ({"model": 8}, "unknown mesh axis 'model': the axes are data, fsdp"),
        ],
    )
    def test_bad_shapes(self, shape, message):
        with pytest.raises(ValueError, match=message):
            make_mesh(shape)

    def test_parse(self):
        assert parse_mesh("data=2, fsdp=-1") == {"data": 2, "fsdp": -1}
        for text in ("data", "data=", "data=two", "=2", "", "data=2,data=4"):
            with pytest.raises(ValueError, match="mesh"):
                parse_mesh(text)
