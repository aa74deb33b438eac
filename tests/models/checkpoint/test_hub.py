"""Models by their name on the hub, from a hub on this machine that the library itself talks to."""

import gzip
import hashlib
import importlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import huggingface_hub
import huggingface_hub.constants
import pytest

from polyhead.models.checkpoint import hub, hub_files, hub_requests, hub_transfer, hub_watch, load
from polyhead.models.checkpoint.hub import DownloadOptions, HubSource, download
from polyhead.models.checkpoint.hub_files import HubFile, find_quantisation, is_usable_name, list_gguf_sets
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.core.json_files import JsonLimit
from tests.support.hub_stub import COMMIT, HubStub, serve_hub

fcntl = pytest.importorskip("fcntl")

LARGE = bytes(range(256)) * 40  # longer than what the stub stores as a small file
QUANTISATIONS = ("Q2_K", "Q4_K_M", "Q8_0")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    constants = huggingface_hub.constants
    with serve_hub() as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_transfer, "RETRY_SECONDS", 0.0)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield served


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def gguf_files(*names: str) -> dict[str, bytes]:
    return {name: name.encode() + LARGE for name in names}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", ("org/name", "", "", "")),
        ("org/name@v1/x", ("org/name", "", "v1/x", "")),
        ("org/name:q4_k_m", ("org/name", "", "", "q4_k_m")),
        ("org/name@v2:UD-Q4_K_XL", ("org/name", "", "v2", "UD-Q4_K_XL")),
        ("org/name/a.gguf", ("org/name", "a.gguf", "", "")),
        ("org/name/deep/er/a.Q8_0.gguf@main", ("org/name", "deep/er/a.Q8_0.gguf", "main", "")),
    ],
)
def test_forms_of_a_source(source: str, expected: tuple[str, ...]) -> None:
    assert HubSource.parse(source) == HubSource(*expected)


@pytest.mark.parametrize(
    "source",
    ["name", "org/name:", "org/name/a.safetensors", "org/name/../a.gguf", "org/name/a.gguf:Q4", "org/name:Q4@main"],
)
def test_what_is_no_form_of_a_source(source: str) -> None:
    assert HubSource.parse(source) is None


def test_a_folder_is_loaded_by_name_without_pickles_or_code(
    stub: HubStub, tiny_classifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = folder_files(tiny_classifier)
    others = ("pytorch_model.bin", "modeling.py", "onnx/model.onnx", "model.fp16.safetensors", "original/a.safetensors")
    stub.repositories["org/name"] = files | dict.fromkeys((*others, "consolidated.safetensors"), bytes(64 << 10))
    stub.repositories["org/name"]["consolidated.safetensors"] *= 1100
    with caplog.at_level(logging.INFO):
        assert load("org/name").task == "classify"
    assert set(stub.contents()) == {name for name in files if Path(name).suffix in (".json", ".txt", ".safetensors")}
    assert COMMIT in caplog.text
    before = len(stub.contents())
    assert load("org/name@v2").task == "classify"
    assert len(stub.contents()) == before  # all of it is in the cache


def test_only_the_shards_of_the_index_are_downloaded(stub: HubStub) -> None:
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model-00001-of-00009.safetensors")
    stub.repositories["org/name"] = dict.fromkeys((*names, "model.other.safetensors"), LARGE) | {
        "model.safetensors.index.json": index,
        "config.json": b"{}",
    }
    path = download("org/name")
    assert sorted(each.name for each in path.iterdir()) == sorted(
        ("config.json", "model.safetensors.index.json", *names[:2])
    )


def test_shards_beside_one_whole_file_are_not_downloaded() -> None:
    """The folder's reader takes the whole file, as transformers does."""
    files = [HubFile(name) for name in ("model.safetensors", "model-00001-of-00001.safetensors")]
    chosen = hub_files.choose_weights(files, {"model-00001-of-00001.safetensors"})
    assert [file.name for file in chosen] == ["model.safetensors"]


def test_modules_of_an_embedder_are_downloaded() -> None:
    names = ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    files = [HubFile(name) for name in (*names, "model.safetensors", "onnx/config.json", "a/b/config.json")]
    chosen = [*hub_files.choose_small_files(files), *hub_files.choose_weights(files, ())]
    assert {file.name for file in chosen} == {*names, "model.safetensors"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", "m.Q4_K_M.gguf"),
        ("org/name:q8_0", "m.Q8_0.gguf"),
        ("org/name@v2:Q2_K", "m.Q2_K.gguf"),
        ("org/name/m.Q2_K.gguf", "m.Q2_K.gguf"),
        ("org/name:Q6_K", "m.Q6_K-00001-of-00002.gguf"),
        ("org/name:BF16", "BF16/m-00001-of-00002.gguf"),
        ("org/name:Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("org/name/BF16/m-00002-of-00002.gguf", "BF16/m-00001-of-00002.gguf"),
        ("org/name/mmproj-F16.gguf", "mmproj-F16.gguf"),
    ],
)
def test_a_gguf_model_by_its_quantisation_or_file(stub: HubStub, source: str, expected: str) -> None:
    split = [f"{stem}-0000{part}-of-00002.gguf" for stem in ("m.Q6_K", "BF16/m") for part in (1, 2)]
    whole = [f"m.{each}.gguf" for each in QUANTISATIONS]
    stub.repositories["org/name"] = gguf_files(*whole, *split, "m-UD-Q4_K_XL.gguf", "mmproj-F16.gguf", "README.md")
    path = download(source)
    assert path.relative_to(path.parents[len(Path(expected).parts) - 1]).as_posix() == expected
    parts = 2 if "-of-" in expected else 1
    found = [each for each in path.parent.iterdir() if each.suffix == ".gguf"]
    assert len(found) == parts
    assert all(
        each.read_bytes() == each.relative_to(path.parents[len(Path(expected).parts) - 1]).as_posix().encode() + LARGE
        for each in found
    )


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        (
            ("m.Q2_K.gguf", "m.Q8_0.gguf"),
            "org/name",
            r"no GGUF file of the quantisation Q4_K_M, which is taken if none",
        ),
        (("m.Q2_K.gguf", "m.Q8_0.gguf"), "org/name:Q5_0", r"quantisation Q5_0; there are Q2_K, Q8_0"),
        (("a.Q2_K.gguf", "b.Q2_K.gguf"), "org/name:Q2_K", r"name one, .*: a\.Q2_K\.gguf, b\.Q2_K\.gguf"),
        (("m.Q2_K.gguf",), "org/name/x.gguf", r"has no file 'x\.gguf'; there are Q2_K"),
        (("m.Q2_K-00001-of-00002.gguf",), "org/name:Q2_K", "no GGUF files of models at all"),
        (("config.json", "pytorch_model.bin"), "org/name", r"only pickled weights \(pytorch_model\.bin\)"),
        (("config.json", "onnx/model_q4.onnx"), "org/name", r"only an ONNX graph \(onnx/model_q4\.onnx\)"),
        (("onnx/model.onnx",), "org/name", r"only an ONNX graph \(onnx/model\.onnx\), which is read only as"),
        (("config.json",), "org/name", "has no weights"),
        (("../m.gguf", "a//m.gguf", "/m.gguf"), "org/name", "has no weights"),
    ],
)
def test_a_repository_without_the_wanted_model(
    stub: HubStub, files: tuple[str, ...], source: str, message: str
) -> None:
    stub.repositories["org/name"] = gguf_files(*files)
    with pytest.raises(CheckpointError, match=f"^'{source}', on the hub: .*{message}"):
        download(source)
    assert not stub.contents()


def test_an_onnx_graph_is_downloaded_where_there_are_no_safetensors(stub: HubStub) -> None:
    graph = ("onnx/model.onnx", "onnx/model.onnx_data")
    small = ("config.json", "tokenizer.json")
    stub.repositories["org/name"] = gguf_files(*small, *graph, "onnx/model_quantized.onnx", "pytorch_model.bin")
    folder = download("org/name")
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert sorted(found) == sorted((*small, *graph))


def test_the_only_gguf_model_needs_no_name(stub: HubStub) -> None:
    stub.repositories["org/name"] = gguf_files("model-f16.gguf", "mmproj.gguf")
    assert download("org/name").name == "model-f16.gguf"


def test_an_interrupted_connection_is_continued(stub: HubStub) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    stub.cut_after, stub.cuts = 3000, 2
    assert download("org/name").read_bytes() == LARGE
    asked = [given for _, path, given in stub.requests if path.startswith("/store/")]
    assert asked == ["", "bytes=3000-", "bytes=6000-"]


def test_parts_of_contents_that_are_not_listed_any_more_are_removed(stub: HubStub, tmp_path: Path) -> None:
    """Unless they have grown lately, by another program perhaps."""
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    download("org/name")
    blobs = tmp_path / "cache" / "models--org--name" / "blobs"
    left, growing = (blobs / f"{digit * 64}.incomplete" for digit in "ab")
    for part in (left, growing):
        part.write_bytes(b"x" * 1000)
    os.utime(left, (0, 0))
    stub.repositories["org/name"] = {"a.gguf": LARGE[:-1]}
    shutil.rmtree(blobs.parent / "snapshots")
    assert download("org/name").read_bytes() == LARGE[:-1]
    assert [path.name for path in blobs.glob("*.incomplete")] == [growing.name]


def test_an_interrupted_process_is_continued(stub: HubStub) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    stub.cut_after, stub.cuts = 3000, 1

    def stop(done: int, total: int) -> None:
        assert total == len(LARGE)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download("org/name", DownloadOptions(stop))
    seen: list[tuple[int, int]] = []
    assert download("org/name", DownloadOptions(lambda *each: seen.append(each))).read_bytes() == LARGE
    assert stub.requests[-1][2] == "bytes=3000-"
    assert seen[-1] == (len(LARGE) - 3000, len(LARGE) - 3000)


def test_a_server_without_ranges_sends_all_again(stub: HubStub) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    stub.cut_after, stub.cuts, stub.ranges = 3000, 1, False
    assert download("org/name").read_bytes() == LARGE


def test_a_connection_that_brings_nothing_is_given_up(stub: HubStub) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    stub.cut_after, stub.cuts = 0, 100
    with pytest.raises(CheckpointError, match="'org/name' is no folder or file here, and the hub did not send it"):
        download("org/name")
    assert stub.cuts == 100 - hub_transfer.RETRIES


@pytest.mark.parametrize("ranges", [True, False])
def test_a_content_that_comes_too_slowly_is_given_up_and_continued(
    stub: HubStub, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    """Each byte is progress, so that retries alone have no end. A hub may be slow while it repeats what is there."""
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    stub.cut_after, stub.cuts = 3000, 100
    message = r"org/name.*the hub sends it too slowly: \d+ bytes in the last 0 s.*load it again, and it goes on"
    with monkeypatch.context() as spans:
        spans.setattr(hub_transfer, "SPAN_SECONDS", 1e-9)
        with pytest.raises(CheckpointError, match=message):
            download("org/name")
        [partial] = hub.storage_of("org/name").rglob("*.incomplete")
        came = partial.stat().st_size
        assert 0 < came <= 3000
        spans.setattr(hub_transfer, "MAX_SLOW_SPANS", 1)
        stub.ranges = ranges
        with pytest.raises(CheckpointError, match="too slowly"):
            download("org/name")
        assert partial.stat().st_size == came
    stub.cuts = 0
    assert download("org/name").read_bytes() == LARGE
    assert stub.requests[-1][2] == f"bytes={came}-"


def test_a_pause_or_a_slow_moment_is_no_slow_download() -> None:
    tally = hub_transfer.Tally("org/name", 1 << 30, hub.ignore_progress, span_start=0.0)
    span, least = hub_transfer.SPAN_SECONDS, hub_transfer.MIN_SPAN_BYTES
    for count, now in ((1, 1.0), (1, 10 * span), (least - 1, 10 * span + 1), (1, 11 * span), (1, 12 * span)):
        tally.check_speed(count, now)
    tally.check_speed(least - 1, 13 * span - 1)
    tally.check_speed(1, 13 * span)
    tally.check_speed(1, 14 * span)
    tally.check_speed(1, 14 * span + 1)
    with pytest.raises(CheckpointError, match="2 bytes in the last 15 s, and 4 KiB a second are the least"):
        tally.check_speed(1, 15 * span)


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "a header": (HEAD + b"X-A: ", b"a"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "an extension of a chunk": (CHUNKED + b"1;", b"a"),
    "a trailer": (CHUNKED + b"1\r\n\0\r\n0\r\nX-A: ", b"a"),
}
DESCRIPTION, CONTENT = "/api/models/org/name", "/store/org/name/a.gguf"


@pytest.fixture
def time_is_over(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a request is over once the hub's answer drips."""
    find_error = hub_watch.RequestWatch._find_error

    def find(watch: hub_watch.RequestWatch) -> Exception | None:
        if stub.drips and stub.dripping.is_set():  # a drip that ends may set it once more
            watch._seconds_left = -1.0
        return find_error(watch)

    monkeypatch.setattr(hub_watch.RequestWatch, "_find_error", find)
    monkeypatch.setattr(hub_watch, "CHECK_SECONDS", 0.01)


def is_locked(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.usefixtures("time_is_over")
@pytest.mark.parametrize("path", [DESCRIPTION, CONTENT])
@pytest.mark.parametrize("kind", DRIPS)
def test_an_answer_without_an_end_is_given_up(stub: HubStub, path: str, kind: str) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    stub.drips[path] = DRIPS[kind]
    with pytest.raises(CheckpointError, match=r"org/name.*(does not begin within 60 s|sends nothing of it for 60 s)"):
        download("org/name")
    assert not any(map(is_locked, hub.storage_of("org/name").rglob("*.incomplete")))
    stub.drips.clear()
    stub.dripping.clear()
    assert download("org/name").read_bytes() == LARGE


@pytest.mark.usefixtures("time_is_over")
def test_a_description_that_does_not_come_leaves_the_cache(stub: HubStub) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    path = download("org/name")
    stub.drips[DESCRIPTION] = DRIPS["a header"]
    assert download("org/name") == path


@pytest.mark.parametrize("path", [DESCRIPTION, CONTENT])
def test_a_download_that_nobody_wants_ends_while_it_waits(
    stub: HubStub, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """With its threads and its lock."""
    monkeypatch.setattr(hub_watch, "CHECK_SECONDS", 0.01)
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    stub.drips[path] = DRIPS["a header"]

    def check() -> None:
        if stub.dripping.is_set():
            raise TimeoutError("the load was cancelled")

    with pytest.raises(CheckpointError, match="the load was cancelled"):
        download("org/name", DownloadOptions(check_wanted=check))
    assert not any(map(is_locked, hub.storage_of("org/name").rglob("*.incomplete")))


def test_a_download_waits_for_another_while_it_is_wanted(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_watch, "CHECK_SECONDS", 0.01)
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    digest = hashlib.sha256(LARGE).hexdigest()
    partial = hub.storage_of("org/name") / "blobs" / f"{digest}.incomplete"
    partial.parent.mkdir(parents=True)
    left = 50

    def check() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise TimeoutError("the load was cancelled")

    with partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="the load was cancelled"):
            download("org/name", DownloadOptions(check_wanted=check))
    assert not stub.contents()
    assert download("org/name").read_bytes() == LARGE


def test_a_request_has_all_the_time_until_it_is_limited() -> None:
    """On a busy machine the watch looks before the request has begun."""
    watch = hub_watch.RequestWatch(hub_watch.always_wanted)
    watch._seconds_left -= 3600
    assert watch._find_error() is None
    watch.allow(-1, "it is late")
    assert str(watch._find_error()) == "it is late"


def test_a_pause_of_the_process_is_no_slow_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the looks at the time count."""
    watch = hub_watch.RequestWatch(hub_watch.always_wanted)
    watch.allow(3 * hub_watch.CHECK_SECONDS, "too slow")
    looks = iter([False] * 3 + [True])
    monkeypatch.setattr(watch._ended, "wait", lambda _: next(looks))
    watch.run()
    assert watch.error is None
    looks = iter([False, True])
    watch.run()
    assert isinstance(watch.error, hub_watch.TooSlowError)


def test_an_error_that_comes_slowly_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_requests, "ERROR_SECONDS", -1.0)
    pieces = iter([b"begin"] * 10)
    errors = hub_requests.library_part("errors")
    client = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])  # the library's, by its version
    answer = client.Response(503, content=pieces, request=client.Request("GET", "http://127.0.0.1/"))
    with pytest.raises(errors.HfHubHTTPError):
        hub_requests.raise_for_status(answer)
    assert len(list(pieces)) == 9


def test_a_content_with_another_digest_is_refused(stub: HubStub) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    stub.digests["a.gguf"] = "0" * 64
    with pytest.raises(CheckpointError, match=r"content of a\.gguf is not the one that the hub lists"):
        download("org/name")
    stub.digests.clear()
    assert download("org/name").read_bytes() == LARGE


def test_refusals_of_the_hub(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.repositories["org/gated"] = {"a.gguf": LARGE}
    stub.gated.add("org/gated")
    with pytest.raises(CheckpointError, match="terms must be accepted on its page first; HF_TOKEN"):
        download("org/gated")
    with pytest.raises(CheckpointError, match="no such repository, or it is private; HF_TOKEN"):
        download("org/nothing")
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    with pytest.raises(CheckpointError, match="the repository has no such revision"):
        download("org/name@v9")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert download("org/gated").read_bytes() == LARGE
    assert set(stub.tokens[-3:]) == {"Bearer hf_right"}


def test_without_the_hub_the_cache_is_used(
    stub: HubStub, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub.repositories["org/name"] = folder_files(tiny_classifier)
    stub.repositories["org/files"] = gguf_files(*(f"m.{each}.gguf" for each in QUANTISATIONS))
    folder, file = download("org/name"), download("org/files@v2:Q8_0")
    stub.failing |= {"org/name", "org/files"}
    assert (download("org/name"), download("org/files@v2:q8_0")) == (folder, file)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    caplog.clear()
    assert load("org/name").task == "classify"
    assert f"HF_HUB_OFFLINE is set; its files in the cache are used, revision {COMMIT}" in caplog.text
    assert download(f"org/name@{COMMIT}") == folder
    with pytest.raises(CheckpointError, match="no GGUF file of the quantisation Q2_K; there are Q8_0"):
        download("org/files@v2:Q2_K")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set, and the cache does not have it"):
        download("org/files")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        download("org/other")


def test_the_library_finds_what_was_downloaded(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.repositories["org/name"] = gguf_files("a.gguf")
    path = download("org/name")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache = huggingface_hub.constants.HF_HUB_CACHE
    assert huggingface_hub.hf_hub_download("org/name", "a.gguf", cache_dir=cache) == str(path)


def test_disk_use_is_bounded(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    with pytest.raises(CheckpointError, match=r"its files have 0\.0 MiB; a download may have 0\.0 MiB at most"):
        download("org/name", DownloadOptions(max_bytes=len(LARGE) - 1))
    monkeypatch.setattr(hub_transfer, "RESERVED_BYTES", 1 << 60)
    with pytest.raises(CheckpointError, match=r"are to be downloaded, and .* are free in"):
        download("org/name")
    assert not stub.contents()


def test_files_without_a_size_are_not_downloaded(stub: HubStub) -> None:
    """A negative size would take that of others off."""
    stub.repositories["org/name"] = {"a-00001-of-00002.gguf": LARGE, "a-00002-of-00002.gguf": LARGE}
    for wrong in (-len(LARGE), None, "9"):
        stub.sizes["a-00002-of-00002.gguf"] = wrong
        with pytest.raises(CheckpointError, match=r"the hub names no size of a-00002-of-00002\.gguf"):
            download("org/name", DownloadOptions(max_bytes=10))
    assert not stub.contents()


def test_a_file_without_a_digest_stays_in_its_folder(stub: HubStub) -> None:
    """The library would place it where the hub's header ETag says."""
    content = b"short"
    stub.repositories["org/name"] = {"a.gguf": content}
    stub.answers["/api/models/org/name"] = described([{"rfilename": "a.gguf", "size": len(content), "blobId": "../x"}])
    path = download("org/name")
    assert path.read_bytes() == content
    assert path.resolve().name == hashlib.sha256(content).hexdigest()
    assert path.resolve().parent == path.parent.parent.parent / "blobs"
    stub.answers["/api/models/org/name"] = described([{"rfilename": "b.gguf", "size": 3}])
    stub.repositories["org/name"] = {"b.gguf": content}
    with pytest.raises(CheckpointError, match=r"the content of b\.gguf is not the one that the hub lists"):
        download("org/name")


def test_another_hub_places_no_files_by_the_library(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_transfer, "MAX_PLAIN_BYTES", 1000)
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    with pytest.raises(CheckpointError, match=r"are downloaded from https://huggingface\.co only"):
        download("org/name")
    assert not stub.contents()


def described(siblings: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps({"sha": COMMIT, "siblings": siblings}).encode()


@pytest.mark.parametrize(
    ("status", "headers", "content", "message"),
    [
        (200, {"Content-Encoding": "gzip, gzip"}, b"", "answers in the encoding 'gzip, gzip'"),
        (404, {"Content-Encoding": "br"}, b"", "answers in the encoding 'br'"),
        (200, {}, b" " * 3000, "answer is longer than"),
        (200, {}, b'{"a":[' + b"[]," * 500 + b"[]]}", "has 1004 values; 100 are the most"),
        (200, {}, b'{"a":[' + b"1," * 100 + b"1]}", "has 103 values; 100 are the most"),
        (302, {"Location": "file:///etc/passwd"}, b"", "redirects to 'file://.*', which is no address of a server"),
        (200, {}, b"[]", "should be an object, not a list"),
        (200, {}, b"{", "is no JSON"),
        (302, {"Location": "/api/models/org/name"}, b"", "redirects more than 10 times"),
        (*described([{"rfilename": 5}]), "a list of files with names"),
        (*described("a"), "a list of files with names"),
        (404, {"X-Error-Code": "RepoNotFound"}, b"x" * 100_000, "there is no such repository"),
    ],
)
def test_answers_of_a_hub_are_bounded(
    stub: HubStub,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    headers: dict[str, str],
    content: bytes,
    message: str,
) -> None:
    """The library decompresses answers and reads all of them."""
    monkeypatch.setattr(hub_requests, "ANSWER_LIMIT", JsonLimit(2000, 100))
    stub.answers["/api/models/org/name"] = status, headers, content
    with pytest.raises(CheckpointError, match=message):
        download("org/name")


def test_a_redirect_to_a_file_is_no_error_of_the_connection(stub: HubStub) -> None:
    """No further attempt is made."""
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    content = f"/org/name/resolve/{COMMIT}/a.gguf"
    stub.answers[content] = 302, {"Location": "file:///etc/passwd"}, b""
    with pytest.raises(CheckpointError, match="which is no address of a server"):
        download("org/name")
    assert [path for _, path, _ in stub.requests].count(content) == 1


def test_cookies_of_a_hub_are_not_kept(stub: HubStub) -> None:
    """The library has one client for the process: a hub that sets others in each answer would fill the memory."""
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    content = f"/org/name/resolve/{COMMIT}/a.gguf"
    stub.answers[content] = 302, {"Location": f"{stub.url}/there", "Set-Cookie": "a=" + "x" * 1000}, b""
    stub.answers["/there"] = 404, {"Set-Cookie": "b=1"}, b""
    with pytest.raises(CheckpointError):
        download("org/name")
    assert "/there" in [path for _, path, _ in stub.requests]
    assert not list(huggingface_hub.get_session().cookies.jar)


def test_names_of_files_are_short_and_in_few_folders(stub: HubStub) -> None:
    """Each part of a name is looked at, and an end of it for a quantisation."""
    assert is_usable_name("/".join("a" * 17))
    assert not is_usable_name("/".join("a" * 18))
    assert is_usable_name("/".join(["a" * 200] * 5))
    assert not is_usable_name("/".join(["a" * 200] * 6))
    stub.answers["/api/models/org/name"] = described([{"rfilename": "a/" * 100_000 + "a.gguf", "size": 3}])
    with pytest.raises(CheckpointError, match="it has no weights"):
        download("org/name")
    assert find_quantisation(PurePosixPath("x" * 100 + "-Q4_K_M.gguf")) == "Q4_K_M"
    assert find_quantisation(PurePosixPath("Q4" + "_K" * 40 + ".gguf")) == ""


def test_incomplete_split_sets_of_many_parts_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of the parts that should be there would be made for each of the sets."""
    counted = list[int]()

    def count(*ends: int) -> range:
        counted.append(len(range(*ends)))
        return range(*ends)

    monkeypatch.setattr(hub_files, "range", count, raising=False)
    wanting = [HubFile(f"{number}-00001-of-99999.gguf", 1) for number in range(1000)]
    whole = [HubFile(f"a-0000{part}-of-00003.gguf", 1) for part in (1, 2, 3)]
    other = [HubFile(f"b-0000{part}-of-00003.gguf", 1) for part in (1, 2, 4)]
    assert [each.parts for each in list_gguf_sets([*wanting, *whole, *other])] == [tuple(whole)]
    assert counted == [3, 3]


def test_a_load_that_is_cancelled_ends_while_files_are_listed(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[str]()

    class CancelledError(Exception):
        pass

    def check_wanted() -> None:
        if looked:
            raise CancelledError

    def look(name: str) -> bool:
        looked.append(name)
        return True

    monkeypatch.setattr(hub, "is_usable_name", look)
    stub.answers["/api/models/org/name"] = described([{"rfilename": f"{number}.gguf"} for number in range(10_000)])
    with pytest.raises(CancelledError):
        download("org/name", DownloadOptions(check_wanted=check_wanted))
    assert len(looked) < 2000


def test_a_compressed_content_is_refused(stub: HubStub) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    bomb = gzip.compress(bytes(1 << 20))
    stub.answers["/store/org/name/a.gguf"] = 200, {"Content-Encoding": "gzip"}, bomb
    with pytest.raises(CheckpointError, match="answers in the encoding 'gzip'"):
        download("org/name")


def test_progress_is_logged(stub: HubStub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    monkeypatch.setattr(hub_transfer, "LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        download("org/name")
    assert "org/name: 0.0 MiB of 0.0 MiB are downloaded" in caplog.text


def test_a_hub_that_names_no_commit(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.repositories["org/name"] = {"a.gguf": LARGE}
    monkeypatch.setattr("tests.support.hub_stub.COMMIT", "../../../etc")
    with pytest.raises(CheckpointError, match=r"commit '\.\./\.\./\.\./etc', which is none"):
        download("org/name")


def test_the_extra_is_named_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HAS_HUB_LIBRARY", False)
    with pytest.raises(UnsupportedError, match=r"polyhead\[hub\]"):
        download("org/name:Q8_0")
