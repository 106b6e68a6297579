"""`hf-speculate tune`: measure what rounds cost and what is accepted, choose the tree that pays best, predict, verify.

What the figures mean:

- cost curve: seconds of a whole round without the draft (preparation, forward, sampler, cache), by draft nodes and
  context, medians of rounds of the real decoding loop whose drafts a script makes; and of one token of stock `generate`
  at the same contexts, in turn with them.
- drafting: seconds of the drafter's own share of a round by depth, for each width.
- acceptance: from rounds on the prompts, drafted as deep and wide as is worth a look. Candidates are judged by
  replaying these rounds; the best of them are then run, and judged by what was accepted of their own drafts.
- prediction: what a call costs outside its rounds + rounds x (cost of such a round + drafting), against stock
  `generate` at the same contexts. Only acceptance, and the share outside rounds, are taken from speculative runs.
- measured: whole calls of `generate` on the same prompts (or others: `--verify-prompts`), interleaved with stock's.
"""
