"""dsde inside vLLM: the same policies choose how many tokens each of vLLM's requests drafts. See docs/vllm.md.

Lengths are chosen beside vLLM's scheduler, so that all workers obey one decision; workers report what they measured.
Knows core and policies, and nothing else of dsde. vLLM itself is imported only when it loads the plugin.
"""
