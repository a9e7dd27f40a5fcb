"""Passages, words, names and periods: what is read from a text before anything is scored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_router.retrieval.names import NameBook, names_of
from cartridge_router.retrieval.passages import MIN_TAIL_WORDS, PASSAGE_WORDS, split_passages
from cartridge_router.retrieval.periods import Period, question_period
from cartridge_router.retrieval.words import fold_words


@given(st.lists(st.sampled_from(["alpha", "beta", "x1"]), max_size=700))
def test_passages_hold_every_word_in_order(words: list[str]) -> None:
    """Nothing is lost, nothing is said twice, and no passage is much longer than wanted."""
    passages = split_passages(" ".join(words))
    assert " ".join(passages).split() == words
    assert all(len(one.split()) < PASSAGE_WORDS + MIN_TAIL_WORDS for one in passages)


def test_a_list_of_short_lines_is_cut_by_line() -> None:
    """Sample questions become one passage each; a repeated one counts once."""
    text = "what is my balance\nshow my balance\n\nhow much money is left\nshow my balance"
    assert split_passages(text) == (
        "what is my balance",
        "show my balance",
        "how much money is left",
    )


def test_a_conversation_is_no_list() -> None:
    """Its lines are short, but each says more than one thing: they are read together."""
    text = "Ann: Hello! Are you in?\nBob: Yes. Come up.\nAnn: Fine! One minute.\nBob: Good."
    assert split_passages(text) == (" ".join(text.split()),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Café DÉJÀ", "cafe deja"),
        ("JenniferMoore", "jennifer moore"),
        ("Lothair's mother", "lothair mother"),
        ("the girls' school", "the girls school"),
        ("O’Brien", "obrien"),
        ("snake_case-words", "snake case words"),
    ],
)
def test_spellings_of_the_same_words_fold_alike(one: str, other: str) -> None:
    """Case, accents, possessives and joined words do not tell words apart."""
    assert fold_words(one) == fold_words(other)


def test_ideographs_stand_alone() -> None:
    """A script without spaces gives one word a sign."""
    assert fold_words("図書館 9") == ["図", "書", "館", "9"]


def test_a_name_inside_a_longer_name_is_not_meant() -> None:
    """The longest name at a place wins, and what it covers is used up."""
    book = NameBook([names_of("House of Cards", ()), names_of("Cards", ())])
    (mention,) = book.scan(fold_words("who made house of cards?"))
    assert [number for number, _ in mention.documents] == [0]
    (alone,) = book.scan(fold_words("a pack of cards"))
    assert [number for number, _ in alone.documents] == [1]


def test_a_title_is_named_without_its_note_and_by_its_aliases() -> None:
    """A parenthesis may be left out, which names it less surely than the whole title."""
    names = names_of("Chicken (dance)", ["Funky Chicken"])
    assert names["chicken", "dance"] > names["funky", "chicken"] > names["chicken",]


def test_a_name_of_stopwords_alone_names_nothing() -> None:
    """A document called "The Who" would be in every question."""
    assert names_of("The Who", ()) == {}


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_mentions_never_overlap(words: list[str]) -> None:
    """Each word of a text belongs to one name at most, from left to right."""
    book = NameBook([{("a", "b"): 1.0}, {("b", "c", "a"): 1.0}, {("c",): 1.0}])
    ends = [0]
    for one in book.scan(words):
        assert one.start >= ends[-1]
        ends.append(one.end)


@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("revenue in Q3 2031", Period(2031, 3)),
        ("the third quarter of fiscal year 2031", Period(2031, 3)),
        ("2031Q4 costs", Period(2031, 4)),
        ("2031 fourth quarter", Period(2031, 4)),
        ("the handbook for FY2031", Period(2031)),
        ("the first quarter", None),
        ("room 2031b", None),
    ],
)
def test_reads_the_period_that_a_question_names(text: str, period: Period | None) -> None:
    """A quarter counts only beside a year."""
    assert question_period(text) == (period, False)


def test_a_question_may_ask_for_the_latest() -> None:
    """Unless it names a period itself."""
    assert question_period("in the latest report") == (None, True)
    assert question_period("the latest change in 2031") == (Period(2031), False)
    assert question_period("the latest report compared with previous ones") == (None, False)


def test_a_year_covers_its_quarters() -> None:
    """And no other year's."""
    assert Period(2031).covers(Period(2031, 2))
    assert not Period(2031, 1).covers(Period(2031, 2))
    assert not Period(2030).covers(Period(2031, 2))
