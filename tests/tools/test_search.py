"""bm25: scores against the formula by hand, deterministic order, clear errors for bad corpora."""

import gzip
import json
import math

import pytest

from masflow.errors import SpecError
from masflow.tools.search import make

ROWS = [
    {"id": "a", "text": "red apple"},
    {"id": "b", "text": "green apple pie"},
    {"id": "c", "text": "Apple, red!"},
    {"id": "d", "text": "the sky"},
]


def corpus(tmp_path, rows=ROWS):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_scores_follow_the_lucene_variant_of_bm25(tmp_path):
    found = make({"corpus": corpus(tmp_path), "top_k": 4, "k1": 1.2, "b": 0.75})(query="red pie")
    mean_length = (2 + 3 + 2 + 2) / 4

    def idf(n):
        return math.log(1 + (4 - n + 0.5) / (n + 0.5))

    def weight(n, length):
        return idf(n) / (1 + 1.2 * (1 - 0.75 + 0.75 * length / mean_length))

    expected = {"b": weight(1, 3), "a": weight(2, 2), "c": weight(2, 2)}
    assert dict(zip(found["ids"], found["scores"], strict=True)) == pytest.approx(expected, abs=1e-5)
    assert found["ids"] == ["b", "a", "c"]


def test_equal_scores_stand_in_corpus_order_also_at_the_cut(tmp_path):
    rows = [{"id": str(i), "text": "same words here"} for i in range(50)]
    search = make({"corpus": corpus(tmp_path, rows), "top_k": 7})
    assert search(query="words")["ids"] == [str(i) for i in range(7)]


@pytest.mark.parametrize("query", ["", "  ", "?!", "unheard of"])
def test_a_query_that_shares_no_term_finds_nothing(tmp_path, query):
    assert make({"corpus": corpus(tmp_path)})(query=query) == {
        "text": "",
        "passages": [],
        "ids": [],
        "scores": [],
    }


def test_a_passage_without_a_shared_term_is_never_a_hit(tmp_path):
    assert make({"corpus": corpus(tmp_path), "top_k": 4})(query="sky")["ids"] == ["d"]


def test_unique_terms_makes_repeating_a_word_pointless(tmp_path):
    path = corpus(tmp_path)
    plain, unique = make({"corpus": path}), make({"corpus": path, "unique_terms": True})
    assert plain(query="sky sky")["scores"][0] == pytest.approx(2 * plain(query="sky")["scores"][0], abs=1e-5)
    assert unique(query="sky sky SKY") == unique(query="sky")


def test_text_is_the_passages_one_a_line_and_other_fields_are_kept(tmp_path):
    rows = [{"key": 7, "body": "red fox", "title": "Fox"}, {"key": 8, "body": "red hen", "title": "Hen"}]
    found = make({"corpus": corpus(tmp_path, rows), "text_field": "body", "id_field": "key"})(query="red")
    assert found["text"] == "red fox\nred hen"
    assert found["passages"][0] == {"id": "7", "text": "red fox", "title": "Fox"}


def test_a_title_is_searched_with_its_text_and_stays_out_of_it(tmp_path):
    path = tmp_path / "titled.jsonl"
    rows = [
        {"id": "a", "title": "Warsaw", "text": "the capital on the vistula"},
        {"id": "b", "title": "Poland", "text": "a country"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, titled = (make({"corpus": str(path), **more}) for more in ({}, {"title_field": "title"}))
    assert plain("warsaw")["ids"] == []
    assert titled("warsaw")["ids"] == ["a"] and titled("vistula")["ids"] == ["a"]
    assert titled("warsaw")["text"] == "the capital on the vistula"
    with pytest.raises(
        SpecError, match="no passage has a 'headline'; the first one has id, text, title"
    ) as caught:
        make({"corpus": str(path), "title_field": "headline"})
    assert [p.code for p in caught.value.problems] == ["bad-corpus-field"]


def test_a_gzipped_corpus_gives_the_same(tmp_path):
    path = tmp_path / "corpus.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    assert make({"corpus": str(path)})(query="red pie") == make({"corpus": corpus(tmp_path)})(query="red pie")


def test_a_corpus_is_indexed_once_and_again_when_it_changes(tmp_path):
    path = corpus(tmp_path)
    first = make({"corpus": path})
    assert make({"corpus": path, "top_k": 2}).index is first.index
    corpus(tmp_path, [*ROWS, {"id": "e", "text": "a new one"}])
    assert make({"corpus": path})(query="new")["ids"] == ["e"]


def test_a_corpus_without_any_word_is_searched_in_vain(tmp_path):
    assert make({"corpus": corpus(tmp_path, [{"id": "a", "text": "…"}])})(query="x")["ids"] == []


def test_every_bad_row_is_named_with_file_and_line(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        '{"id": "a", "text": "x"}\nnonsense\n[1]\n{"id": "b", "words": "y"}\n{"id": "a", "text": "z"}\n'
    )
    with pytest.raises(SpecError) as caught:
        make({"corpus": str(path)})
    assert [(p.file, p.line, p.code) for p in caught.value.problems] == [
        (str(path), n, "bad-corpus-row") for n in (2, 3, 4, 5)
    ]
    assert "field 'text' must be text, got None; fields here: id, words" in str(caught.value)
    assert "id 'a' stands on line 1 already" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.jsonl", None, "missing-corpus"),
        ("empty.jsonl", b"", "empty-corpus"),
        ("x.jsonl", b"\xff\xfe", "bad-corpus"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "abc"}', mtime=0)[:-6], "bad-corpus"),
    ],
)
def test_an_unreadable_corpus_is_a_problem_of_the_user(tmp_path, name, content, code):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        make({"corpus": str(path)})
    assert [p.code for p in caught.value.problems] == [code]
