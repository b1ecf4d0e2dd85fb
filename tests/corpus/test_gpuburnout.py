"""configs/data/gpuburnout.py on local folders of the hub's schema, small enough for a test."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, config_files
from jaxlm.corpus import documents, prepare

TEXT = "the of and to that have with be model data water history energy school people system number light cell river"
WORDS = TEXT.split()


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(7, 15))).capitalize() + "."


def prose(seed: str, sentences: int = 14) -> str:
    rng = random.Random(seed)
    return "\n".join(" ".join(sentence(rng) for _ in range(3)) for _ in range(sentences // 3 + 1))


def write(path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def hub(tmp_path):
    root = tmp_path / "hub"
    web = [{"text": prose(f"w{i}"), "url": f"https://site{i}.org/a", "score": 3.1} for i in range(40)]
    web[7]["text"] += "\nPersonX gives PersonY a gift."
    web.append(dict(web[3]))
    write(root / "HuggingFaceFW/fineweb-edu/sample/100BT/0.parquet", web)
    maths = [
        {"text": prose(f"m{i}") + f"\n\n$x_{i}^2 + {i} = 0$", "url": "https://m.org", "score": 4} for i in range(20)
    ]
    maths.append({"text": web[5]["text"], "url": "https://copy.org", "score": 4})
    write(root / "HuggingFaceTB/finemath/finemath-4plus/0.parquet", maths)
    body = "def function_{0}(argument, other_{0}):\n    '''{1}'''\n    return [argument + {0}, other_{0} * 2]\n"
    code = [{"text": body.format(i, prose(f"c{i}", 3))} for i in range(12)]
    write(root / "Avelina/python-edu-cleaned/data/0.parquet", code)
    return root


def run(*overrides: str) -> prepare.Prepared:
    c = config_lib.resolve(config_files.load("data/gpuburnout", overrides))
    return prepare.prepare(c.prepare, c.data, c.engine, lambda _: None)


def test_the_mix_is_prepared_from_local_folders(tmp_path, hub):
    done = run(f"data.hub_dir={hub}", f"data.dir={tmp_path / 'd'}", "prepare.workers=1")
    kept = {name: source["kept"]["documents"] for name, source in done.manifest["sources"].items()}
    assert kept == {"fineweb_edu": 39, "finemath": 21, "python_edu": 12}  # a copy gone; finemath's copy of web wins
    texts = [d.text for paths in documents.find(done.path).values() for p in paths for d in documents.read_documents(p)]
    assert len(texts) == 72
    assert not any("PersonX" in text for text in texts)


def test_a_repository_that_is_not_there_is_named(tmp_path, hub):
    (hub / "Avelina").rename(hub / "Someone")
    with pytest.raises(ConfigError, match="python-edu-cleaned"):
        run(f"data.hub_dir={hub}", f"data.dir={tmp_path / 'd'}")
