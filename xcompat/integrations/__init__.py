"""Integrations with LangChain, LlamaIndex and Haystack, a module each."""
