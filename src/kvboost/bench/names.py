"""Names of workloads and questions, for those who choose before anything is loaded."""

WORKLOADS = (
    "system-prompt",
    "multi-turn",
    "code",
    "few-shot",
    "rag-first",
    "rag-middle",
    "rag-shuffled",
    "agent",
)
QUESTIONS = ("length", "share", "modes", "frontier", "chunk", "memory", "hits")

QUICK_WORKLOADS = ("system-prompt", "rag-middle", "rag-shuffled")
QUICK_SYSTEMS = (
    "transformers",
    "transformers-prefix",
    "kvboost-exact",
    "kvboost-auto",
    "kvboost-public",
    "vllm",
)
QUICK_QUESTIONS = ("length", "share", "frontier")
