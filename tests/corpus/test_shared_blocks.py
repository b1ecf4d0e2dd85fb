"""What the pages of a site share is furniture, whatever it is called; what comes back inside a text is not."""

import pathlib

import pytest

from jaxlm import config as config_lib
from jaxlm.config import config_files
from jaxlm.configs import base
from jaxlm.corpus import documents, prepare, shared_blocks
from jaxlm.corpus.sources.base import SourceSpec
from jaxlm.corpus.sources.units import split_source

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def page(i):
    """A page without any telling class name: what is furniture only the other pages tell."""
    number = " ".join(NUMBERS[int(digit)] for digit in f"{i:03}")
    text = [f"<p>The part {number} is made of steel, and part {i * 7} of brass is mounted on it with care.</p>"]
    text += [f"<p>Sentence {j} about {number}, which no other page of this manual has in it.</p>" for j in range(8)]
    text.insert(5, "<p>This part is not safe for children.</p>")
    return (
        "<html><head><title>Manual</title></head><body><div><a href=/>Acme parts shop</a> <span>Call us day and night</span>"
        f"</div><div><div><h2>Part {number}</h2><h3>Synopsis</h3>{''.join(text)}</div>"
        "<div><p>Parts that others bought: the spring, the lever, the long bolt.</p></div></div>"
        "<div><p>Acme is a firm of the county of Kent. All prices with tax.</p></div></body></html>"
    )


@pytest.fixture
def site(tmp_path):
    for name, pages in (("shop", 30), ("small", 8)):
        (tmp_path / "pages" / name).mkdir(parents=True)
        for i in range(pages):
            (tmp_path / "pages" / name / f"{i}.html").write_text(page(i if name == "shop" else 500 + i))
    return tmp_path / "pages"


def prepared(site: pathlib.Path, out: pathlib.Path, **settings) -> prepare.Prepared:
    config = config_files.load("base")
    config.unlock()
    config.data.dir = str(out)
    config.prepare.update(settings)
    config.prepare.sources.web = base.source(str(site), ("html",))
    c = config_lib.resolve(config)
    return prepare.prepare(c.prepare, c.data, c.engine, log=lambda line: None)


def test_a_block_that_a_tenth_of_the_pages_have_at_one_place_is_found(site):
    spec = SourceSpec("web", str(site))
    tasks = list(shared_blocks.samples(split_source(spec, 10_000)))
    assert [{part.name.partition("/")[0] for part in parts} for task in tasks for parts in task] == [{"shop"}]
    shared = shared_blocks.find(spec, tasks[0])
    assert set(shared) == {"shop"}  # 8 pages tell nothing
    assert sum(map(len, shared["shop"].values())) >= 3
    assert shared == shared_blocks.find(spec, next(shared_blocks.samples(split_source(spec, 1 << 20))))


def test_it_goes_and_the_text_stays_however_many_tasks_there_are(site, tmp_path):
    one, many = prepared(site, tmp_path / "a", workers=1), prepared(site, tmp_path / "b", workers=2, task_mb=0.004)
    texts = [dict(documents.read_texts(documents.find(done.path)["web"])) for done in (one, many)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 38
    assert set(one.manifest["shared"]["web"]) == {"shop"}
    assert one.manifest["shared"] == many.manifest["shared"]
    for name, text in texts[0].items():
        in_shop = name.startswith("shop")
        assert ("Acme is a firm" in text) != in_shop
        assert ("Parts that others bought" in text) != in_shop
        assert ("Call us" in text) <= (not in_shop)
        assert text.count("Sentence") == 8
        assert "Synopsis" in text
        assert "not safe for children" in text


def archived(pages) -> bytes:
    """WARC records of (URL, page)."""
    records = []
    for url, html in pages:
        kind = "image/png" if url.endswith(".png") else "text/html"
        payload = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n{html}".encode()
        lines = ["WARC/1.0", "WARC-Type: response", f"WARC-Target-URI: {url}", f"Content-Length: {len(payload)}"]
        head = "\r\n".join([*lines, "Content-Type: application/http; msgtype=response"]) + "\r\n\r\n"
        records.append(head.encode() + payload + b"\r\n\r\n")
    return b"".join(records)


def test_the_site_of_a_page_in_warc_files_is_its_host(tmp_path):
    folder = tmp_path / "crawl"
    folder.mkdir()
    for half in (0, 1):  # a host's pages are spread over both files
        shop = [(f"https://www.shop.org/{i}", page(i)) for i in range(half, 30, 2)]
        small = [(f"https://small.org/{i}", page(500 + i)) for i in range(half, 8, 2)]
        (folder / f"{half}.warc").write_bytes(archived(shop + small))
    one, many = (prepared(folder, tmp_path / f"{n}", workers=n, task_mb=mb) for n, mb in ((1, 256), (2, 0.004)))
    assert set(one.manifest["shared"]["web"]) == {"shop.org"}  # 8 pages of a host tell nothing
    assert one.manifest["shared"] == many.manifest["shared"]
    texts = [text for _, text in documents.read_texts(documents.find(one.path)["web"])]
    assert len(texts) == 38
    assert sum("Acme is a firm" in text for text in texts) == 8
    assert all(text.count("Sentence") == 8 and "Synopsis" in text for text in texts)


@pytest.mark.parametrize("others", ["captures", "images"])
def test_captures_of_one_page_and_images_are_no_pages_of_a_site(tmp_path, others):
    pages = [("https://shop.org/3", page(3))] * 30 if others == "captures" else []
    pages += [(f"https://shop.org/{i}", page(i)) for i in range(4)]
    pages += [(f"https://shop.org/{i}.png", "PNG, no page") for i in range(30)] if others == "images" else []
    (tmp_path / "crawl").mkdir()
    (tmp_path / "crawl/0.warc").write_bytes(archived(pages))
    made = prepared(tmp_path / "crawl", tmp_path / "out")
    assert "shared" not in made.manifest
    texts = [text for _, text in documents.read_texts(documents.find(made.path)["web"])]
    assert len(set(texts)) == 4
    assert all("Acme is a firm" in text for text in texts)
