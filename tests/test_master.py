"""The master property: decoding step by step gives the logits of one masked forward pass."""

from __future__ import annotations

import random

import pytest
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestras import (
    Recording,
    gap_of_a_missed_change,
    largest_gap,
    make_request,
    run_all,
    scheduler_for,
)

from stretto.engines.hf import HFEngine

TOLERANCE = 1e-4
KINDS = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"]
NUM_SLOTS = 512
seeds = st.integers(0, 10**6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_stepwise_logits_equal_one_masked_pass(kind: str, seed: int) -> None:
    model = tiny_model(kind)
    engine = Recording(HFEngine(model, NUM_SLOTS))
    request = make_request(seed)
    run_all(scheduler_for(engine, NUM_SLOTS), [request])
    assert largest_gap(model, request, engine) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, page_size=st.sampled_from([1, 2, 4, 16]))
def test_shuffled_slots_garbage_and_other_requests(kind: str, seed: int, page_size: int) -> None:
    model = tiny_model(kind)
    hf = HFEngine(model, NUM_SLOTS)
    fill_with_garbage(hf, seed)
    engine = Recording(hf)
    num_pages = NUM_SLOTS // page_size
    order = random.Random(seed).sample(range(num_pages), num_pages)
    requests = [make_request(seed + k) for k in range(3)]
    run_all(scheduler_for(engine, num_pages, page_size, order=order), requests)
    for request in requests:
        assert largest_gap(model, request, engine) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@settings(max_examples=20, deadline=None)
@given(seed=seeds, page_size=st.sampled_from([1, 4]))
def test_preempted_requests_come_back_bit_for_bit(kind: str, seed: int, page_size: int) -> None:
    model = tiny_model(kind)
    engine = Recording(HFEngine(model, NUM_SLOTS))
    requests = [make_request(seed + k, max_positions=512) for k in range(4)]
    scheduler = scheduler_for(engine, 160 // page_size, page_size)
    run_all(scheduler, requests)
    for request in requests:
        if request.finish_reason != "length":
            assert largest_gap(model, request, engine) < TOLERANCE


def fill_with_garbage(engine: HFEngine, seed: int) -> None:
    """Every slot gets finite values up to 1e4: what is hidden or free must not matter."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in (*engine.cache.keys, *engine.cache.values):
        tensor.copy_((torch.rand(tensor.shape, generator=generator) * 2 - 1) * 1e4)


def test_the_property_can_fail() -> None:
    """A view that misses one change is noticed."""
    model = tiny_model("llama")
    gap = gap_of_a_missed_change(model, HFEngine(model, NUM_SLOTS), NUM_SLOTS)
    assert gap > TOLERANCE
