"""Queries of a new model in other people's frameworks: LangChain, LlamaIndex and Haystack, one module each."""
