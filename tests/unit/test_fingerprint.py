from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.fingerprint import BITS, NEAR_BITS, distance, identity, simhash

TALE = (
    "The harbour master kept a ledger in which every vessel had a page, and on each page he noted what the "
    "crew had said about the weather, the price of rope, and how long they meant to stay. When a schooner "
    "arrived late one evening with torn sails, he asked nothing, lit his lamp, and wrote down the hour. "
    "Nobody had told him that the ledger would be read aloud in court twenty years afterwards, nor that his "
    "careful handwriting would decide who owned the island beyond the reef. "
)
RECIPE = (
    "Rinse the lentils under cold water until it runs clear, then simmer them with two bay leaves and half "
    "an onion. Meanwhile toast cumin and coriander seeds in a dry pan, crush them coarsely, and fry them in "
    "butter together with garlic, ginger and a pinch of turmeric. Fold everything into the pot, season with "
    "salt and lemon, and let it rest for ten minutes before serving it over rice with chopped parsley. "
)
CHINESE = (
    "港口的管理员有一本账簿，每艘船都占一页，他在上面记下船员们谈到的天气、绳索的价格以及他们打算停留多久。"
    "有一天夜里，一艘帆船带着破损的风帆靠岸，他什么也没有问，只是点亮了灯，写下了时间。"
    "没有人告诉他，二十年以后这本账簿会在法庭上被大声朗读，他工整的字迹将决定礁石外那座小岛属于谁。"
)
OTHER_CHINESE = (
    "先用冷水把小扁豆洗净，再放入两片月桂叶和半个洋葱，用小火慢慢煮软。同时在干锅里把孜然和香菜籽炒香，"
    "压碎以后放进黄油里，与大蒜、生姜和少许姜黄一起翻炒。最后把所有东西倒回锅中，加盐和柠檬汁调味，"
    "静置十分钟，盛在米饭上，撒上大量切碎的欧芹即可上桌。"
)


DRAW = random.Random(7)
VOCABULARY = ["".join(DRAW.choices("abcdefghiklmnoprstuvw", k=DRAW.randint(2, 9))) for _ in range(3000)]
WEIGHTS = list(itertools.accumulate(1 / rank for rank in range(1, len(VOCABULARY) + 1)))


def invented(words: int, seed: int) -> list[str]:
    """Text of an invented language whose frequent words are very frequent, as in any language."""
    return random.Random(seed).choices(VOCABULARY, cum_weights=WEIGHTS, k=words)


def off(a: str, b: str) -> int:
    return distance(simhash(a), simhash(b))


def test_distance_counts_the_bits_that_differ() -> None:
    assert distance(0b1010, 0b0110) == 2
    assert distance(0, (1 << 64) - 1) == 64


@given(st.text())
def test_a_fingerprint_has_64_bits_and_does_not_change(text: str) -> None:
    assert 0 <= simhash(text) < 1 << BITS
    assert simhash(text) == simhash(text)


@pytest.mark.parametrize("text", ["", " \n\t", "?!... --- ..."])
def test_a_text_without_words_has_no_fingerprint(text: str) -> None:
    assert simhash(text) == 0


@pytest.mark.parametrize(
    "text", ["a", "Z", "7", "é", "字", "🙂 ok", "x" * 100_000, "\ud800 half a character"]
)
def test_any_word_gives_a_fingerprint(text: str) -> None:
    assert simhash(text) != 0


def test_it_is_the_same_in_every_process() -> None:
    code = f"from orchestrator.core.fingerprint import simhash; print(simhash({TALE!r}))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {str(simhash(TALE))}


def test_layout_case_and_punctuation_do_not_matter() -> None:
    assert simhash(TALE) == simhash(TALE.upper().replace(" ", "\n  ").replace(",", ";"))


def test_a_changed_name_number_or_date_moves_it_little() -> None:
    text = f"{TALE} {RECIPE} Order %s of %s, placed on %s."
    first = text % ("4711", "Anna Keller", "2024-03-18")
    second = text % ("90125", "Bob Novak", "2025-11-02")
    assert 0 < off(first, second) <= NEAR_BITS


def test_unrelated_texts_are_far_apart() -> None:
    assert off(TALE, RECIPE) >= 20
    assert off(CHINESE, OTHER_CHINESE) >= 20


def test_scripts_without_spaces_have_shingles_of_their_own() -> None:
    changes = [("帆船", "渔船"), ("二十年", "三十年"), ("小岛", "灯塔"), ("点亮了灯", "关上了门")]
    moved = [off(CHINESE, CHINESE.replace(old, new)) for old, new in changes]
    assert max(moved) <= NEAR_BITS
    assert any(moved)


@pytest.mark.parametrize("words", [300, 1000, 3000])
def test_of_long_texts_with_three_changed_words_at_most_one_in_a_hundred_is_not_near(words: int) -> None:
    draw = random.Random(words)
    near = 0
    for seed in range(200):
        text = invented(words, seed)
        changed = list(text)
        for place in draw.sample(range(words), 3):
            changed[place] = f"changed{draw.random()}"
        near += off(" ".join(text), " ".join(changed)) <= NEAR_BITS
    assert near >= 198


@pytest.mark.parametrize("words", [300, 1000, 3000])
def test_an_appended_sentence_leaves_a_text_near(words: int) -> None:
    near = 0
    for seed in range(100):
        text, sentence = invented(words, seed), invented(15, 1000 + seed)
        near += off(" ".join(text), " ".join(text + sentence)) <= NEAR_BITS
    assert near >= 95


@pytest.mark.parametrize("words", [30, 300, 3000])
def test_prompts_that_share_only_their_first_60_percent_are_told_apart(words: int) -> None:
    apart = 0
    for seed in range(200):
        shared = invented(words * 6 // 10, 3 * seed)
        rests = [invented(words * 4 // 10, 3 * seed + turn) for turn in (1, 2)]
        first, second = (" ".join(shared + rest) for rest in rests)
        apart += off(first, second) > NEAR_BITS
    assert apart >= 190


def test_a_very_long_text_is_read_in_parts_only() -> None:
    class Text(str):
        __slots__ = ("read",)

        def __getitem__(self, part: object) -> str:
            piece = str.__getitem__(self, part)  # type: ignore[index]
            self.read = getattr(self, "read", 0) + len(piece)
            return piece

    text = Text(" ".join(invented(100_000, 0)))
    assert simhash(text) != 0
    assert text.read <= 8192 < len(text)


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_an_identity_is_equal_for_equal_parts_only(a: list[bytes], b: list[bytes]) -> None:
    assert (identity(a) == identity(b)) == (a == b)


def test_an_identity_tells_where_one_part_ends() -> None:
    assert identity([b"ab", b"c"]) != identity([b"a", b"bc"]) != identity([b"abc"])
    assert len(identity([])) == 32
    assert int(identity([b"x"]), 16) > 0
