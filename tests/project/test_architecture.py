"""Rules of the repository: imports, the places of files, names, and calls that are forbidden.

Layers are contracts of import-linter (pyproject.toml).  This file checks what these cannot express.  Exceptions are
rows of literal tables, each with its reason; an exception that is no longer needed also fails.
"""

import ast
import graphlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.places import ROOT

PACKAGES = ("models", "service", "training")
BANNED_FILES = {"utils", "util", "common", "helpers", "helper", "misc"}
BANNED_CLASS = re.compile(r"(Manager|Helper|Util|Utils|Base|Mixin|Handler|Wrapper|Factory)$")
FAMILY = re.compile(
    r"bert|gpt[-_ ]?2|(?<!o)llama|qwen|gemma|mistral|smol|electra|mpnet|marian|bart(?!e)", re.IGNORECASE
)
OPTIONAL = (
    "huggingface_hub",
    "ray",
    "msgpack",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "captum",
    "matplotlib",
    "sklearn",
    "transformers",
    "peft",
    "openai",
)
BANNED_CALLS = {"eval", "exec", "__import__"}
BANNED_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle", "runpy"}
URL_HOSTS = {
    "127.0.0.1",
    "aclanthology.org",
    "arxiv.org",
    "daringfireball.net",  # named by the licence of a library of the web page
    "doi.org",
    "github.com",
    "huggingface.co",
    "json-schema.org",
    "prometheus-operated.monitoring.svc",  # a Service inside a cluster: where the operator's Prometheus is
    "www.apache.org",
    "www.w3.org",
}
RESERVED = re.compile(r"(^|\.)example(\.com)?$", re.IGNORECASE)  # reserved for documentation (RFC 2606)

# Exceptions to a bound, with the reason.
MANY_ARGUMENTS = {
    "models/checkpoint/gguf_header.py:_build_entry": "partially applied: callers pass one argument",
    "models/network/triton_attention.py:_add_up": "a kernel on a GPU gets addresses and sizes one by one",
    "models/network/triton_attention.py:_attend": "the same",
    "models/network/triton_attention.py:_score": "a part of that kernel",
    "service/cli/main.py:chat": "each is an option of the command",
    "service/cli/main.py:decide": "each is an option of the command",
    "service/cli/main.py:key": "each is an option of the command",
    "service/cli/checkpoint_commands.py:explain": "each is an option of the command",
    "service/cli/checkpoint_commands.py:calibrate": "each is an option of the command",
    "models/executors/torch_executor.py:__init__": "all but the network and its head by keyword, each with a default",
    "models/native/native_executor.py:__init__": "all but the network and its head by keyword, each with a default",
}
GET_PREFIXES = {
    "service/api/shared/dialect.py:__get_pydantic_core_schema__": "pydantic asks for a method of this name",
    "service/api/shared/dialect.py:__get_pydantic_json_schema__": "pydantic asks for a method of this name",
    "service/api/shared/tagged_unions.py:__get_pydantic_core_schema__": "pydantic asks for a method of this name",
    "service/api/http/connection.py:get_buffer": "asyncio asks for a method of this name",
    "service/api/http/tls.py:get_buffer": "asyncio asks for a method of this name",
    "service/api/http/tls.py:_get_write_buffer_size": "a method of asyncio's class has this name",
    "service/config/settings.py:get_field_value": "pydantic-settings asks for a method of this name",
}
BROAD_EXCEPTS = {
    "models/checkpoint/hub_watch.py": "whatever ends a load is raised on the thread that waits for the hub",
    "models/network/varlen.py": "Triton raises many kinds for a missing compiler or folder, and for a GPU too small",
    "models/tokenizer/panics.py": "the tokenizers library panics, which is no Exception",
    "models/tokenizer/vocabulary.py": "the tokenizers library raises bare Exception for bad data, nothing narrower",
    "service/concurrency/outcome.py": "any job of a thread may fail, and the thread must continue",
}
FAMILY_WORDS = {
    "models/checkpoint/sentence_modules.py": "sentence_bert_config.json is what a file of an embedder is called",
    "models/checkpoint/label_folders.py": "bert_layer is an encoder in the names of tensors, whatever its family",
    "models/checkpoint/late_interaction.py": "ColBERT is what a method, and the kind of its checkpoints, is called",
    "models/checkpoint/head_config.py": "sbert_ce is in the name of a field of cross-encoders of any family",
    "models/checkpoint/merged_adapter.py": "the same field",
    "models/checkpoint/more_outputs.py": "colbert_linear is what the file of an output is called",
    "models/checkpoint/published_rerankers.py": "the names of published rerankers, whose prompts differ",
    "service/api/dialects/openai/wire.py": "colbert_vecs is what clients call an output",
    "models/checkpoint/gguf_file.py": "Llama 3's scaling, which GGUF keeps in a tensor",
    "models/network/model_config.py": "llama3 is what checkpoints call that way of scaling, whatever the family",
    "models/tokenizer/tokenizer_files.py": "the names that vocab.txt folders give their tokenizer classes",
    "models/tokenizer/sentencepiece_folder.py": "the names that folders give their tokenizer classes",
    "models/tokenizer/gguf_vocabulary.py": "GGUF names its kinds of vocabulary after families",
    "models/tokenizer/gguf_splits.py": "a table of data: GGUF names the ways to split text after families",
    "models/tokenizer/vocabulary.py": "the ways to split text that several formats have, named after families",
    "models/tokenizer/text_growth.py": "BertNormalizer and BertPreTokenizer are what the library calls two steps",
    "service/config/setting_types.py": "an example of a model's name, for people",
}


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """The module's name; for modules of the product, the installed one."""
    return ".".join(("polyhead", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=label(path))


@cache
def walked(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def nodes(path: Path, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in walked(path) if isinstance(node, kinds))


def imported(node: ast.AST, package: str = "") -> list[str]:
    """Every dotted name an import statement in a module of `package` may load; of `from a import b`, a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
        source = ".".join([*parents, *filter(None, [node.module])])
        return [f"{source}.{alias.name}" for alias in node.names]
    return []


def imports(path: Path) -> set[str]:
    package = module_of(path) if path.stem == "__init__" else module_of(path).rpartition(".")[0]
    return {name for node in nodes(path, ast.Import, ast.ImportFrom) for name in imported(node, package)}


def modules_of(path: Path, known: set[str]) -> set[str]:
    """The modules among `known` that `path` imports: a.b where that is a module, else the a that has b in it."""
    names = {name if name in known else name.rpartition(".")[0] for name in imports(path)}
    return names & known - {module_of(path)}


def places(path: Path, found: list[ast.AST]) -> list[str]:
    return [f"{label(path)}:{getattr(node, 'lineno', 1)}" for node in found]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


PRODUCT = files(*PACKAGES)
CODE = files(*PACKAGES, "benchmarks", "deploy", "docs", "examples")
EVERYTHING = files(*PACKAGES, "benchmarks", "deploy", "docs", "examples", "tests")


def test_the_product_is_found() -> None:
    assert {module_of(path).split(".")[1] for path in PRODUCT} == set(PACKAGES)


def test_no_import_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count too: they are cycles as well."""
    known = {module_of(path) for path in PRODUCT}
    graph = {module_of(path): modules_of(path, known) for path in PRODUCT}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_imports_stand_at_the_top() -> None:
    late = ("service/cli/main.py", "service/cli/checkpoint_commands.py", "service/fleet/ray_app.py")
    for path in (path for path in PRODUCT if label(path) not in late):
        scopes = nodes(path, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inner = {node for scope in scopes for node in ast.walk(scope) if isinstance(node, ast.Import | ast.ImportFrom)}
        assert not places(path, [*inner]), "imports inside a function"
        banned = {"typing.TYPE_CHECKING", "importlib", "importlib.import_module"} & imports(path)
        assert not banned, label(path)


def test_a_module_has_one_name() -> None:
    """A module imported as `service.x` and as `polyhead.service.x` would exist twice, with two copies of each class.

    Within models, service or training imports are relative; across them they begin with `polyhead`.
    """
    for path in PRODUCT:
        package, *_ = path.relative_to(ROOT).parts
        levels = len(path.relative_to(ROOT).parts) - 1
        for node in nodes(path, ast.Import, ast.ImportFrom):
            place = f"{label(path)}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level <= levels, f"{place} leaves {package}"
                continue
            for name in imported(node):
                assert name.split(".")[0] not in PACKAGES, f"{place}: polyhead.{name}"
                assert not name.startswith(f"polyhead.{package}."), f"{place}: relative, within {package}"


def test_the_root_of_service_contains_only_packages() -> None:
    entries = {path.name for path in (ROOT / "service").iterdir() if not path.name.startswith((".", "__pycache__"))}
    assert {name for name in entries if "." in name} == {"__init__.py"}
    assert len(entries - {"__init__.py"}) <= 16


def test_the_api_and_text_modules_load_no_torch() -> None:
    sides = [*files("service/api"), ROOT / "service/text/tokenization.py", ROOT / "service/core/request.py"]
    code = "import sys\n" + "".join(
        f"import {module_of(path)}\nassert 'torch' not in sys.modules, 'torch came with {module_of(path)}'\n"
        for path in sides
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def on_ray(path: Path) -> bool:
    """Whether a module needs the extra ray. Only the command line imports such modules, on request."""
    return label(path) == "service/fleet/ray_app.py" or label(path).startswith("service/fleet/")


def needs_gpu(path: Path) -> bool:
    """Whether a module needs Triton, which comes with torch's builds for GPUs."""
    return label(path) == "models/network/triton_attention.py"


def test_optional_parts_may_be_missing() -> None:
    names = [module_of(p) for p in PRODUCT if p.stem != "__main__" and not (on_ray(p) or needs_gpu(p))]
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_only_settings_reads_the_environment() -> None:
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = [
        place
        for path in PRODUCT
        if label(path) != "service/config/settings.py"
        for place in places(
            path,
            [n for n in nodes(path, ast.Attribute) if n.attr in words]
            + [n for n in nodes(path, ast.ImportFrom) if n.module == "os" and {a.name for a in n.names} & words],
        )
    ]
    assert not found


def test_metrics_are_declared_in_one_place() -> None:
    found = [
        label(path)
        for path in PRODUCT
        if not label(path).startswith("service/metrics/")
        if any(name.split(".")[0] == "prometheus_client" for name in imports(path))
    ]
    assert not found, "declare the metric in service/metrics/metric_table.py and observe it through there"


def test_modules_open_with_a_docstring() -> None:
    """A module that begins with a string is not parsed: the tests are most of the code, and nothing else reads their
    trees."""
    unlike = [path for path in EVERYTHING if not path.read_text("utf-8").startswith('"""')]
    assert not [label(path) for path in unlike if not ast.get_docstring(tree(path))]


def arguments(node: ast.AST) -> int:
    declared = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in declared if argument.arg not in {"self", "cls"}])


def test_functions_take_few_arguments() -> None:
    found = {
        f"{label(path)}:{node.name}"
        for path in CODE
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
        if arguments(node) > 5
    }
    assert found == MANY_ARGUMENTS.keys()


def test_no_class_or_file_has_a_banned_name() -> None:
    assert not {label(path) for path in EVERYTHING if path.stem in BANNED_FILES}
    for path in CODE:
        assert not places(path, [n for n in nodes(path, ast.ClassDef) if BANNED_CLASS.search(n.name)])


def test_functions_have_no_get_prefix() -> None:
    found = {
        f"{label(path)}:{node.name}"
        for path in CODE
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.name.lstrip("_").startswith("get_")
    }
    assert found == GET_PREFIXES.keys()


def words_of(path: Path) -> Iterator[str]:
    """Identifiers and strings of a module, without docstrings and comments."""
    docstrings = {id(node.value) for node in nodes(path, ast.Expr) if isinstance(node.value, ast.Constant)}
    for node in walked(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        for attribute in ("id", "attr", "name", "arg", "module", "asname"):
            if isinstance(word := getattr(node, attribute, None), str):
                yield word


def test_families_are_named_in_the_architectures_only() -> None:
    allowed = ("models/architectures/", "service/runtime/quickstart/")
    found = {
        label(path): sorted({word[:60] for word in words_of(path) if FAMILY.search(word)})
        for path in files("models", "service")
        if not label(path).startswith(allowed)
    }
    found = {name: words for name, words in found.items() if words}
    assert found.keys() == FAMILY_WORDS.keys(), found


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)


def test_broad_excepts_are_counted() -> None:
    found = [label(path) for path in CODE for node in nodes(path, ast.ExceptHandler) if is_broad(node)]
    assert found == sorted(BROAD_EXCEPTS)
    suppressed = re.compile(r"suppress\((Base)?Exception\)")
    assert not [label(path) for path in CODE if suppressed.search(path.read_text("utf-8"))]


def runs_code(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in BANNED_CALLS
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in {"torch.load", "torch.jit.load", "builtins.eval", "builtins.exec", "yaml.load"}
    if isinstance(node, ast.keyword):
        return node.arg in {"trust_remote_code", "allow_pickle", "shell"}
    return any(name.split(".")[0] in BANNED_MODULES or name == "torch.load" for name in imported(node))


def test_nothing_in_a_checkpoint_is_run() -> None:
    assert not [place for path in PRODUCT for place in places(path, [*filter(runs_code, walked(path))])]


@cache
def tracked() -> tuple[tuple[str, str], ...]:
    """Name and text of every text file that is or would be in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(None, listed.split("\0")):
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in data:
            found.append((name, data.decode("utf-8")))
    return tuple(found)


def test_no_path_of_a_machine_is_tracked() -> None:
    temporary = Path(tempfile.gettempdir())
    homes = {ROOT, ROOT.parent, Path.home()} - {Path("/"), temporary, *temporary.parents}
    path = re.compile("|".join([*(re.escape(f"{home}/") for home in homes), r"/(?:home|Users)/[a-z]"]))
    found = [f"{name}: {match[0]}" for name, text in tracked() for match in path.finditer(text)]
    assert not found


def test_addresses_lead_to_known_places() -> None:
    """No package index, image registry or private machine may be named. Permitted hosts are in URL_HOSTS."""
    address = re.compile(r"\bhttps?://((?:[\w-]+\.)+[a-z]{2,}|\d+(?:\.\d+){3})\b", re.IGNORECASE)
    found = {(name, match[1]) for name, text in tracked() for match in address.finditer(text)}
    assert not {(name, host) for name, host in found if host not in URL_HOSTS and not RESERVED.search(host)}


def test_no_file_sets_a_package_index() -> None:
    option = re.compile("--(extra-)?index" + "-url|--find" + "-links|--trusted" + "-host")
    assert not [name for name, text in tracked() if option.search(text)]


def test_the_licence_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8").strip()
    assert text.startswith("Apache License\n                           Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_the_same_commands_as_make() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    assert script.read_text("utf-8").splitlines()[-1] == "exec make test"
