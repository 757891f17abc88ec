from tests.vllm_double import install

install()
