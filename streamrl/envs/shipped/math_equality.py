"""Whether two answers are the same mathematics, by math-verify, with what it does not tell apart.

This runs in a separate process (`math_verify.py`), since it reads what a policy wrote.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from streamrl.envs.shipped.math_text import (
    CJK,
    NUMBER,
    PLAIN_NUMBER,
    TEXT,
    TOKEN,
    is_word,
    unwrapped,
)
from streamrl.envs.shipped.number_words import SCALES

# Signs that keyboards and models have for LaTeX's.
SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ",
    "÷": "/", "⁄": "/", "∕": "/", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "°": r"^\circ ", "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
    "€": r"\$", "£": r"\$", "¥": r"\$",
}  # fmt: skip
SIGN = re.compile("|".join(map(re.escape, SIGNS)))
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
SPACE = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|~")
# How mathematics looks: its size, its colour, how its lines are set.
LOOKS = re.compile(
    r"\\(?:displaystyle|textstyle|large|Large|huge|normalsize|small|bf|rm|it|boldsymbol)\b"
    r"|\\(?:text)?color\s*\{[^{}]*\}"
    r"|\\(?:begin|end)\s*\{(?:aligned|align\*?|equation\*?|gather\*?)\}"
)
# Spellings that the library reads as products of letters or digits, or does not read.
SPELLINGS: list[tuple[re.Pattern[str], str]] = [
    (LOOKS, ""),
    (SPACE, " "),
    (re.compile(r"\\(?:text|mbox)\s*\{(\s*(?:,|and|or|,\s*and|,\s*or)\s*)\}"), r"\1"),
    (re.compile(r"\\colon\b\s*"), ":"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])"), r"\1\\times 10^{\2}"),
    (re.compile(r"(?<=\d)\s*[xX*]\s*10\s*\^"), r"\\times 10^"),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"\\mathbb ([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"(?<=\d) ?(?:[kcm]m|in|ft|yd)\^\{?[23]\}?$"), ""),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt +(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi\b"), r"\\pi"),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|inf|oo)\b"), r"\\infty"),
    (re.compile(r"(?i)(?<=\d)\s*percent\b"), r"\\%"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\degree\b"), r"^\\circ"),
    (re.compile(r"(?<=\d)\s+i(?!\w)"), "i"),
    (re.compile(r"\^(?:\{0?\.5\}|0\.5(?!\d))"), "^{1/2}"),
    (re.compile(r"(?<![\d/.])(\d+) (\d+)/(\d+)(?![\d/.])"), r"\1\\frac{\2}{\3}"),
]
THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\{,\}|,?\\[,;:! ] ?|[ ~])\d{3})+)(?![\d,])")
# 0.1\overline{6}: the digits before the point, after it, and those that repeat.
REPEATING = re.compile(r"(\d{1,9})\.(\d{0,9})\\(?:overline|dot|bar)\s*(?:\{(\d{1,9})\}|(\d))")
# "(B) 12", "B. 12": a choice with what it is.
CHOICE = re.compile(r"\(([A-J])\)(?: .*)?|([A-J])(?:[).:] .*)?", re.DOTALL)
# A date, or a range of two whole numbers: no difference.
AS_WRITTEN = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\d+ ?- ?\d+")
# 10:30 a.m. is no ratio.
TIME = re.compile(r"(?i)(\d{1,2}) ?: ?(\d\d) ?(?:([ap])\.?m\b)?")
SCALED = re.compile(rf"(\\?\$? ?{NUMBER}) ?(?:\\text\s*\{{ ?)?({'|'.join(SCALES)})\b ?\}}?", re.I)
# {x | x > 2}: the condition is the set.
SET_OF = re.compile(
    r"\\\{\s*[A-Za-z](?:\s*\\in\s*\\(?:mathbb|mathbf)\s*\{?R\}?)?\s*(?:\\mid\b|\||:)(.*)\\\}",
    re.DOTALL,
)
OR = re.compile(r",|\bor\b|\\(?:lor|vee|cup)\b")
# x < 2, 2 < x and 2 < x < 3, whose parts are the bounds, the signs and the letter.
BELOW = r"(<|>|\\l[et]q?(?:slant)?\b|\\g[et]q?(?:slant)?\b)"
INEQUALITY = re.compile(rf"(?:([^<>]+?)\s*{BELOW})?\s*([A-Za-z])\s*(?:{BELOW}\s*([^<>]+))?")
# Arithmetic that was left to do, which a prompt may have asked for.
ARITHMETIC = re.compile(r"[\d)}][\s})]*(?:[-+*]|\\times|\\cdot)[\s({]*\\?[\d(f]")
SCIENTIFIC = re.compile(rf"\s*{NUMBER}\s*\\times\s*10\s*\^\s*(?:\{{\s*[-+]?\d+\s*\}}|\d)\s*")
BASE = re.compile(r"_\{?\s*(?:\\text\s*\{)?\s*(\w+)\s*\}?\}?$")
BRACKETS = {"(": ")", r"\{": r"\}"}
# Units of one dimension by their names, for the library takes all of them off.
UNITS = {
    name: names[0]
    for names in (
        ("km", "kilometer", "kilometers", "kilometre", "kilometres"),
        ("m", "meter", "meters", "metre", "metres"),
        ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
        ("mm", "millimeter", "millimeters", "millimetre", "millimetres"),
        ("mile", "miles", "mi"),
        ("foot", "feet", "ft"),
        ("inch", "inches"),
        ("yard", "yards"),
        ("kg", "kilogram", "kilograms"),
        ("g", "gram", "grams"),
        ("mg", "milligram", "milligrams"),
        ("second", "seconds", "sec"),
        ("minute", "minutes", "min"),
        ("hour", "hours", "hr", "hrs"),
        ("day", "days"),
        ("week", "weeks"),
        ("month", "months"),
        ("year", "years"),
        ("dollar", "dollars"),
        ("cent", "cents"),
    )
    for name in names
}
UNIT_AT_END = re.compile(
    rf"(?i)(\d)\s*(?:{'|'.join(name for name in UNITS if len(name) > 2)}|{CJK}{{1,6}})$"
)
# Two numbers that the library takes for equal because both are nearly 0 have to be so close.
NEAR = 1e-3


def equal(right: str, answer: str) -> bool:
    """Whether an answer is the right one. Both are LaTeX or plain text, without dollars."""
    words = unwrapped(answer)
    if words is not None and equal(right, words):
        return True
    right = respelled(right)
    answer = respelled(answer)
    if not right or not answer:
        return False
    if as_words(right) == as_words(answer):
        return True
    scaled = (_scaled(right), _scaled(answer))
    if scaled != (right, answer) and _same_for_library(*scaled):
        return True
    of_scale = SCALED.fullmatch(answer)
    if of_scale and scaled[0] == right and _same_for_library(right, of_scale[1]):
        return True  # "how many million?"
    if _choice(right) and _choice(answer):
        return _choice(right) == _choice(answer)
    if _time(right):
        return _is_same_time(_time(right), _time(answer))
    if is_text(right) or AS_WRITTEN.fullmatch(right):
        return as_words(right) == as_words(answer)
    if PLAIN_NUMBER.fullmatch(right) and (_is_left_to_do(answer) or _is_untrue(answer)):
        return False
    if _unit(right) and _unit(answer) and _unit(right) != _unit(answer):
        return False
    right = UNIT_AT_END.sub(r"\1", right)
    answer = UNIT_AT_END.sub(r"\1", answer)
    if _brackets(right) and _brackets(answer) and _brackets(right) != _brackets(answer):
        return False
    if _base(right) and _base(answer) and _base(right) != _base(answer):
        return False
    return _same_for_library(right, answer)


def is_usable(right: str) -> bool:
    """Whether a right answer is equal to itself, not only as a text: other spellings of it are
    compared by the library.
    """
    right = respelled(right)
    if is_text(right) or AS_WRITTEN.fullmatch(right) or _time(right):
        return True
    return bool(right) and _same_for_library(right, right)


def respelled(text: str) -> str:
    """A text with signs and numbers as LaTeX writes them."""
    text = SIGN.sub(lambda match: SIGNS[match[0]], text)
    text = SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    text = REPEATING.sub(_fraction, text)
    text = THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.strip().rstrip(".,;").strip()
    of_set = SET_OF.fullmatch(text)
    return _union(of_set[1].strip() if of_set else text)


def _scaled(text: str) -> str:
    """A number with the word after it multiplied: 1000000 for "1 million". Otherwise the text."""
    number = SCALED.fullmatch(text)
    if not number:
        return text
    value = Decimal(number[1].lstrip("\\$ ")) * SCALES[number[2].lower()]
    return f"{value:f}"


def _union(text: str) -> str:
    """Inequalities of one letter that are joined by "or" or commas, as a union of intervals. Any
    other text as it is: the library compares a single inequality with an interval.
    """
    parts = [part.strip() for part in OR.split(text)]
    if len(parts) < 2:
        return text
    intervals = [INEQUALITY.fullmatch(part) for part in parts]
    found = [each for each in intervals if each and (each[1] or each[5])]
    if len(found) < len(parts) or len({each[3] for each in found}) > 1:
        return text
    return "\\cup ".join(map(_interval, found))


def _interval(inequality: re.Match[str]) -> str:
    """The interval of x that "a < x < b", or one half of it, is."""
    left, before, _, after, right = inequality.groups()
    ends = {"(": r"-\infty", ")": r"\infty"}
    closed = ""
    for sign, bound, is_lower in ((before, left, True), (after, right, False)):
        if not sign:
            continue
        if ">" in sign or "\\g" in sign:
            is_lower = not is_lower
        ends["(" if is_lower else ")"] = bound.strip()
        if sign not in ("<", ">", r"\lt", r"\gt"):
            closed += "[" if is_lower else "]"
    opening = "[" if "[" in closed else "("
    closing = "]" if "]" in closed else ")"
    return f"{opening}{ends['(']},{ends[')']}{closing}"


def _fraction(repeating: re.Match[str]) -> str:
    """The fraction that a decimal number with digits that repeat is."""
    fixed = repeating[1] + repeating[2]
    period = repeating[3] or repeating[4]
    numerator = int(fixed + period) - int(fixed)
    return f"\\frac{{{numerator}}}{{{(10 ** len(period) - 1) * 10 ** len(repeating[2])}}}"


def _choice(text: str) -> str:
    """The letter of a choice that an answer is, with or without what is chosen."""
    text = " ".join(SPACE.sub(" ", TEXT.sub(r"\1", text)).split())
    match = CHOICE.fullmatch(text)
    if not match or re.match(r"\(?[A-J]\)?(?:,| and| or) ?\(?[A-J]\b", text):
        return ""
    return match[1] or match[2]


def _time(text: str) -> list[str]:
    """The hour, the minute, and "a" or "p" or nothing of a time of day. Empty for other texts."""
    match = TIME.fullmatch(as_words(text))
    return [(group or "").lower() for group in match.groups()] if match else []


def _is_same_time(right: list[str], answer: list[str]) -> bool:
    """Whether two times are the same: one may be without its half of the day."""
    if not answer or [*map(int, right[:2])] != [*map(int, answer[:2])]:
        return False
    return right[2] == answer[2] or not (right[2] and answer[2])


def as_words(text: str) -> str:
    """A text in one spelling: without commands for text, marks at its ends, and brackets around a
    single word. Words have no upper case.
    """
    text = SPACE.sub(" ", respelled(TEXT.sub(r"\1", text)))
    text = " ".join(text.replace("$", " ").split()).strip("\"'`*_ ").rstrip(".,;:")
    while len(text) > 2 and text[0] in "({[" and text[-1] in ")}]" and text[1:-1].isalpha():
        text = text[1:-1]
    return text.rstrip("!").casefold() if is_text(text) else text


def is_text(text: str) -> bool:
    """Whether an answer is words, and no mathematics."""
    if re.search(r"[\d=^+<>]", text):
        return False
    return any(is_word(token) for token in TOKEN.findall(TEXT.sub(r"\1", text))) or bool(
        TEXT.fullmatch(text.strip())
    )


def _is_left_to_do(answer: str) -> bool:
    """Whether an answer is arithmetic that is left to do, as 2+2."""
    side = re.split(r"(?<![\\<>!])=", answer)[-1]
    return bool(ARITHMETIC.search(side)) and not SCIENTIFIC.fullmatch(side)


def _is_untrue(answer: str) -> bool:
    """Whether an answer is only what a number is not, or an equation that does not hold."""
    if re.match(r"\\(?:ne|neq|not)\b", answer):
        return True
    sides = [side.strip() for side in answer.split("=")]
    numbers = [float(side) for side in sides if PLAIN_NUMBER.fullmatch(side)]
    return len(numbers) == len(sides) and len({*numbers}) > 1


def _unit(text: str) -> str:
    """The unit that an answer ends with, if it is one that the library would take for another."""
    words = re.findall(r"[A-Za-z]+", TEXT.sub(r" \1 ", text))
    return UNITS.get(words[-1].lower(), "") if words and re.search(r"\d", text) else ""


def _brackets(text: str) -> str:
    """The bracket around an answer, if it is one that makes a difference: of a set, or of a
    tuple.
    """
    text = re.sub(r"\\(?:left|right)\s*", "", text).strip()
    for opening, closing in BRACKETS.items():
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            if "," in inner and opening not in inner and "\\cup" not in inner:
                return opening
    return ""


def _base(text: str) -> str:
    """The base of a number that is written with one; empty if there is none."""
    match = BASE.search(text)
    return match[1] if match and text[: match.start()].strip().isalnum() else ""


def _same_for_library(right: str, answer: str) -> bool:
    from math_verify import parse, verify

    # the library warns at every call that its time-outs are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(f"\\boxed{{{right}}}", parsing_timeout=0)
    given = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
    if not verify(gold, given, allow_set_relation_comp=True, timeout_seconds=0):
        return False
    return not (gold and given) or _are_near(gold[0], given[0])


def _are_near(right: Any, answer: Any) -> bool:
    """Whether two numbers, which the library takes for equal, differ by little of their size. True
    for whatever is no number.
    """
    try:
        first = complex(right)
        second = complex(answer)
    except Exception:  # SymPy raises whatever its classes raise
        return True
    return first == second or abs(first - second) <= NEAR * max(abs(first), abs(second))
