"""Answers that are the same mathematics, and those that are nearly, as models write them."""

from __future__ import annotations

import pytest

from streamrl.envs.shipped.math_equality import equal

SAME = [
    (r"\frac{7}{2}", "3 1/2"),
    (r"5\text{ cm}", "5 centimeters"),
    ("- 31", "-31"),
    ("-31", "−31"),
    ("1000000", "1,000,000"),
    ("1{,}000", "1000"),
    ("1 000 000", "1000000"),
    (r"11,\! 111,\! 111", "11111111"),
    (r"50\%", "50"),
    ("50", "50 percent"),
    ("5", r"5\text{ cm}"),
    (r"90^\circ", "90°"),
    ("(0,1]", "(0, 1]"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", "2, 1"),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
    ),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "C"),
    (r"1\frac{1}{2}", "1.5"),
    (r"\frac12", "½"),
    (r"\dfrac{1}{2}", "1/2"),
    ("10^{-7}", "1e-7"),
    (r"3 \times 10^8", "3e8"),
    (r"3 \times 10^8", "3 x 10^8"),
    (r"\sqrt{13}", "√13"),
    (r"2\pi", "2π"),
    ("x > 5", r"(5, \infty)"),
    ("[1,2]", r"1 \le x \le 2"),
    (r"\emptyset", r"\varnothing"),
    (r"\pm 2", "2, -2"),
    ("p - q", "-q + p"),
    ("12:30", "12:30"),
    ("2023-05-01", "2023-05-01"),
    ("10-20", "10–20"),
    (r"\text{May 5}", "May 5"),
    ("7", "3 + 4 = 7"),
    ("4210_5", "4210_{5}"),
    (r"30^\circ", r"30\degree"),
    (r"3 \times 10^8", "3 × 10⁸"),
    ("10^{-12}", "10⁻¹²"),
    ("3+4i", "3 + 4 i"),
    (r"\sqrt{2}", "2^{0.5}"),
    (r"\infty", r"+\infty"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"0.1\overline{6}", r"\frac{1}{6}"),
    (r"-0.\dot{3}", r"-\frac{1}{3}"),
    (r"\text{(B)}", r"\textbf{(B)}\ 12"),
    ("B", "(B) twelve"),
    ("B", "B. 12"),
    ("12", "12个"),
]
DIFFERENT = [
    (r"5\text{ cm}", r"5\text{ km}"),
    ("42", r"\neq 42"),
    ("42", "42!"),
    ("5", "6=5"),
    (r"3\sqrt{13}", "3"),
    ("6 - 5i", "5"),
    ("1,-2", "1"),
    ("2,3,4", "2.3"),
    ("- 31", "31"),
    ("(0,1]", "[0,1]"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", r"\{1,2\}"),
    ("x=5", "y=5"),
    ("x > 5", "x < 5"),
    ("x > 5", r"x \ge 5"),
    (r"\text{Evelyn}", "nylevE"),
    ("dog", "god"),
    ("42", "41 or 42"),
    ("42", r"\{41,42\}"),
    ("42", r"x=41 \text{ or } x=42"),
    ("4", "2+2"),
    ("12", r"3 \cdot 4"),
    ("10^{-7}", "10^{-8}"),
    ("1/2^{99}", "1/2^{98}"),
    ("4210_5", "4210_6"),
    ("10-20", "-10"),
    ("2023-05-01", "2017"),
    (r"50\%", "5000"),
    (r"\infty", r"-\infty"),
    ("3.14", r"\pi"),
    ("1.5", "1,5"),
    ("2k+2", "2"),
    ("A", "B"),
    (r"\text{yes}", r"\text{no}"),
    ("5", ""),
    (r"\text{(B)}", r"\textbf{(C)}\ 12"),
    ("B", "A) B"),
    (r"\frac{1}{3}", "0.3"),
    (r"0.\overline{3}", "0.3"),
    (r"10^{12}", "10¹³"),
]


@pytest.mark.parametrize(("right", "answer"), SAME)
def test_another_spelling_is_the_same(right: str, answer: str):
    assert equal(right, answer)


@pytest.mark.parametrize(("right", "answer"), DIFFERENT)
def test_another_value_is_not(right: str, answer: str):
    assert not equal(right, answer)
