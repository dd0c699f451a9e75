"""Sizes and durations: exact numbers in, one way of printing out."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memtrain.units import format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24gb", 24 * 10**9),
        ("24gib", 24 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5TiB", 1536 * 2**30),
        ("1PB", 10**15),
        (" 3 kB ", 3000),
        (".5KiB", 512),
        ("2.KiB", 2048),
        ("7B", 7),
        ("7b", 7),
        ("1.9B", 1),
    ],
)
def test_a_size_is_its_number_times_its_unit(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@given(thousandths=st.integers(1, 10**9), prefix=st.sampled_from(["kB", "MB", "GB", "TB"]))
@example(thousandths=2010, prefix="GB")
def test_a_decimal_fraction_is_not_off_by_a_byte(thousandths: int, prefix: str) -> None:
    unit = {"kB": 1, "MB": 10**3, "GB": 10**6, "TB": 10**9}[prefix]
    assert parse_bytes(f"{thousandths // 1000}.{thousandths % 1000:03d}{prefix}") == thousandths * unit


@given(number=st.integers(1, 2**80))
@example(number=10**400 - 1)
def test_a_number_of_bytes_is_read_exactly_however_large(number: int) -> None:
    assert parse_bytes(f"{number}B") == number


@pytest.mark.parametrize("text", ["24Gb", "24Gib", "24 Gbit", "24 bits", "1 bit", "10Gbps", "10 mbps"])
def test_bits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}' names bits, and memory is counted in bytes: give a positive number"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "24", "GiB", "-1GiB", "nanGB", "infGB", "1e9B", "1,000MB", "24 G", "24iB", "1 EiB", ".B", "24GiB more", "2 4B"]
)
def test_what_is_no_amount_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{text}' is not an amount of memory: give a positive number of .* such as 24GB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0B", "0GiB", "0.0GB", "0.9B"])
def test_less_than_a_byte_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}' is less than one byte: give a positive number"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10234, "9.99 KiB"),
        (10235, "10.0 KiB"),
        (102_348, "99.9 KiB"),
        (102_349, "100 KiB"),
        (1_048_063, "1023 KiB"),
        (1_048_064, "1.00 MiB"),
        (-(3 * 2**29), "-1.50 GiB"),
        (2**41, "2.00 TiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_bytes_print_with_three_or_four_digits(number: int, text: str) -> None:
    assert format_bytes(number) == text


@given(number=st.integers(1, 2**60))
def test_printed_bytes_read_back_within_half_a_percent(number: int) -> None:
    # A part of a byte is cut off.
    assert abs(parse_bytes(format_bytes(number)) - number) <= number / 200 + 1


@given(number=st.integers(0, 2**60))
def test_a_negative_difference_prints_like_a_positive_one(number: int) -> None:
    assert format_bytes(-number).removeprefix("-") == format_bytes(number)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 k"),
        (999_949, "999.9 k"),
        (10**6, "1.0 M"),
        (134_515_008, "134.5 M"),
        (10**9, "1.0 B"),
        (70_553_706_496, "70.6 B"),
    ],
)
def test_counts_print_as_people_say_them(number: int, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0126, "13 ms"),
        (1.0, "1.0 s"),
        (9.94, "9.9 s"),
        (10.4, "10 s"),
        (60, "1 min 00 s"),
        (119.9, "2 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_durations_print_in_their_own_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
