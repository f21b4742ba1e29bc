"""What the figures of `dspark bench` mean, word for word as it prints them."""

from __future__ import annotations

DEFINITIONS = {
    "tokens": "tokens generated, over all prompts and repeats",
    "seconds": "wall time from submitting a prompt to its last token, summed; prefill included",
    "tokens_per_second": "decoding speed: tokens behind the first one / time from the first to the "
    "last one; prefill excluded; median over repeats",
    "speedup_vs_none": "tokens_per_second / that of none in the same repeat; median over repeats",
    "drafted, scheduled, accepted": "draft tokens that were guessed, of these verified, of these "
    "right",
    "predicted": "draft tokens expected to be accepted among the scheduled ones, by the drafter's "
    "confidence",
    "accepted_length": "tokens a round yields, the target's own token included",
    "acceptance_rate": "accepted draft tokens / verified draft tokens",
    "acceptance_by_position": "[k] rounds that accepted draft token k / rounds that verified it "
    "and accepted all before it",
    "draft_ms, verify_ms, other_ms": "mean milliseconds a round spends drafting, in the target's "
    "pass, and on everything else",
    "pipeline": "lanes that the variant had in the end: off is one; on and auto are two",
    "hit_rate": "rounds whose draft had been made while the round before was verified / rounds; "
    "null with one lane",
    "accepted_length_ahead, accepted_length_fresh": "accepted_length of rounds whose draft was "
    "made ahead of the verdict in front of it, and of the others; null without such rounds. Those "
    "made ahead stand behind drafts that were accepted whole, where texts are easy: the two do not "
    "compare",
    "delta": "tokens that a draft made ahead loses because it lacks the last features: "
    "(1 - accepted_length / that with the pipeline off) / hit_rate, on the same prompts; the token "
    "that is coupled instead of verified counts as lost, too",
    "gain_vs_off": "tokens_per_second / that of the drafter with the pipeline off in the same "
    "repeat; median over repeats",
    "gain_predicted": "(1 + r)(1 - h delta) / (1 + (1 - h) r): r = draft_ms / (verify_ms + "
    "other_ms) with it off, h = hit_rate, 1 - h delta = accepted_length / that with it off",
    "ttft_ms": "time from arrival to the first token; median over texts",
    "identical_to_none": "every token id of every text equals that of none; null when sampling",
}
