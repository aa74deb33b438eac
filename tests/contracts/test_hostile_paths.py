"""No source, name or revision that is sent over HTTP leads outside of the model root."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from polyhead.models.checkpoint import describe_source as described
from polyhead.models.checkpoint import hub
from polyhead.models.checkpoint.merged_adapter import base_source
from polyhead.models.checkpoint.source_policy import SourcePolicy
from polyhead.models.core.errors import CheckpointError
from polyhead.service.config.settings import Settings
from polyhead.service.core.names import is_name
from polyhead.service.runtime.loader import known_sources
from tests.service.api.operations.test_admin import Client, serving
from tests.support.hostile import Watch, describe

ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture
def root(tmp_path: Path, tiny_classifier: Path) -> Path:
    """A folder with a model in it; beside it is a folder that must not be reached."""
    shutil.copytree(tiny_classifier, tmp_path / "shelf" / "inside")
    shutil.copytree(tiny_classifier, tmp_path / "the-outside-file")
    (tmp_path / "shelf" / "link").symlink_to(tmp_path / "the-outside-file")
    (tmp_path / "shelf" / "up").symlink_to("..")
    return tmp_path / "shelf"


def outside(root: Path) -> Iterator[str]:
    """Sources that lead to the folder that must not be reached, or to others outside."""
    there = root.parent / "the-outside-file"
    yield from (str(there), f"{root}/../{there.name}", f"../{there.name}", f"inside/../../{there.name}")
    yield from ("link", f"{root}/link", f"up/{there.name}", f"{root}/up/{there.name}/config.json", "..", "/", "/etc")
    yield from (f"inside+../{there.name}", f"../{there.name}+inside", f"link+{there}", "~root", "~", "/proc/self/cwd")
    yield from (f"inside\0/../../{there.name}", f"/../../..{there}", f"./././../{there.name}", "x" * 4096)
    yield from (f"%2e%2e/{there.name}", f"..\\{there.name}", f"file://{there}", f"org/name@../../{there.name}")
    yield from ("org/name@/etc/passwd", "org/..", "../org", "org/name@a/../../../b", "org/name@..")


def test_sources_over_http_lie_in_the_model_root(root: Path) -> None:
    watch = Watch()

    async def act(client: Client) -> None:
        for source in outside(root):
            watch.on = True
            asked = {"name": "new", "source": source}
            load = await client.ask("POST", "/admin/models", asked)
            reload = await client.ask("POST", "/admin/models/judge/reload", {"source": source})
            triton = {"parameters": {"source": source}}
            other = await client.ask("POST", "/v2/repository/models/other/load", triton, headers=ADMIN)
            watch.on = False
            for answer in (load, reload, other):
                assert answer.status_code == 400, (source, answer.text)
                assert str(root.parent) not in answer.text
        assert not watch.events
        assert await client.names() == ["judge"]
        for number, source in enumerate(("inside", str(root / "inside"), "./inside", "up/shelf/inside")):
            asked = {"name": f"new{number}", "source": source}
            assert (await client.ask("POST", "/admin/models", asked)).status_code == 200, source
            assert (await client.ask("POST", f"/admin/models/new{number}/reload")).status_code == 200

    serving(act, {"judge": root / "inside"}, model_root=str(root), memory_mib=4096)


def test_sources_of_the_settings_may_lie_anywhere(root: Path) -> None:
    async def act(client: Client) -> None:
        assert (await client.ask("POST", "/admin/models/judge/reload")).status_code == 200
        same = {"source": str(root.parent / "the-outside-file")}
        assert (await client.ask("POST", "/admin/models/judge/reload", same)).status_code == 200

    serving(act, {"judge": root.parent / "the-outside-file"}, model_root=str(root))


def test_the_default_model_root_is_the_folder_of_fetched_models(root: Path) -> None:
    async def act(client: Client) -> None:
        for source, status in (("inside", 200), (str(root / "inside"), 409), (str(root.parent), 400)):
            asked = {"name": "new" if status != 400 else "other", "source": source}
            assert (await client.ask("POST", "/admin/models", asked)).status_code == status

    serving(act, {"judge": root / "inside"}, model_root="", model_dir=root)


def test_an_adapter_inside_does_not_bring_in_a_base_outside(root: Path) -> None:
    for name in (str(root.parent / "the-outside-file"), "../../the-outside-file", "../link"):
        adapter = root / "adapter"
        shutil.rmtree(adapter, ignore_errors=True)
        adapter.mkdir()
        describe(adapter, "adapter_config.json", peft_type="LORA", base_model_name_or_path=name)
        with pytest.raises(CheckpointError, match="lies outside"):
            described("adapter", SourcePolicy(root))


def test_an_adapter_does_not_show_whether_its_base_exists_outside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the home folder nor by steps out of its own folder, which is deeper than the root."""
    monkeypatch.setenv("HOME", str(root.parent))
    adapter = root / "deep" / "adapter"
    adapter.mkdir(parents=True)
    for start in ("~/", f"{root.parent}/", "../../../", "../../"):
        messages = set()
        for name in ("the-outside-file", "nothing-at-all"):
            describe(adapter, "adapter_config.json", peft_type="LORA", base_model_name_or_path=start + name)
            with pytest.raises(CheckpointError) as raised:
                described("deep/adapter", SourcePolicy(root))
            messages.add(str(raised.value).replace(name, ""))
        assert len(messages) == 1, messages


def test_a_trusted_adapter_names_its_base_in_the_home_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root))
    describe(root, "adapter_config.json", base_model_name_or_path="~/inside")
    policy = SourcePolicy(Path("/"))
    assert policy.locate(base_source(root, policy)) == root / "inside"


def test_without_the_key_answers_do_not_show_whether_a_path_exists(root: Path) -> None:
    messages = set()
    for name in ("the-outside-file", "nothing-at-all", "the-outside-file/config.json"):
        with pytest.raises(CheckpointError) as raised:
            SourcePolicy(root).locate(f"../{name}")
        messages.add(str(raised.value).replace(name, ""))
    assert len(messages) == 1


@pytest.mark.parametrize(
    "name",
    ["..", "../x", "a/../b", "/etc/passwd", "a//b", "a\0b", "a\nb", "~", "%2e%2e", "a\\b", ".hidden", "a/.b", ""],
)
def test_invalid_names_are_rejected(name: str) -> None:
    assert not is_name(name)


@pytest.mark.parametrize("revision", ["..", "../x", "/etc", "a/../b", "a//b", "a..b", "", ".", "a/", "ä", "a\n"])
def test_invalid_revisions_are_rejected(revision: str) -> None:
    assert not hub.is_id(f"org/name@{revision}")


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/3", "0123456789abcdef", "feature_x-1"])
def test_valid_revisions_are_accepted(revision: str) -> None:
    assert hub.is_id(f"org/name@{revision}")


ROUTES = ("/models/{}/predict", "/models/{}", "/v2/models/{}/infer", "/v1/models/{}", "/pipeline/embed/{}", "/admin/{}")
ENCODED = (
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "..%5c..",
    "a%00b",
    "%252e%252e%252f",
    "....//",
    "%c0%ae",
)


def test_names_in_an_address_are_no_paths(root: Path) -> None:
    watch, answers = Watch(), list[httpx.Response]()

    async def act(client: Client) -> None:
        watch.on = True
        for route in ROUTES:
            for name in ENCODED:
                for method, body in (("GET", None), ("POST", {"inputs": "a"})):
                    answers.append(await client.ask(method, route.format(name), body))
        watch.on = False

    serving(act, {"judge": root / "inside"}, model_root=str(root))
    assert {answer.status_code for answer in answers} <= {400, 401, 404, 405}
    assert not [answer for answer in answers if "root:" in answer.text]
    assert not watch.events


def test_what_the_settings_name_may_lie_anywhere_and_so_may_what_is_merged_there() -> None:
    settings = Settings(models={"a": "/far/model+/farther/adapter", "b": "/far/c++/model"})
    assert known_sources(settings) >= {
        "/far/model+/farther/adapter",
        "/far/model",
        "/farther/adapter",
        "/far/c++/model",
    }
