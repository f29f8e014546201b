# make demo    a story from the shipped model, through an expert cache that cannot hold it
# make test    every check and every test; what continuous integration runs
# make test-long  what takes minutes more: kernels under sanitizers and emulated, Triton's in its interpreter
# make test-gpu  what needs a GPU; fails where there is none
# make lint    ruff, mypy and the import contract alone
# make site    the documentation as pages in build/site; a link that leads nowhere is an error
# make env     the virtual environment alone; brought up to date when pyproject.toml changes
#
# PYTHON=...   the interpreter (3.11 or newer) that makes the environment
# TORCH=...    what pip installs as torch, like TORCH=torch==2.15.0; without it an allowed one that is there stays

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help env demo lint test test-gpu test-long site

BIN := .venv/bin
STAMP := .venv/.installed
MODEL := models/stories-7m
export PYTHON TORCH

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

env: $(STAMP)

$(STAMP): pyproject.toml setup.py $(wildcard src/tiermoe/native/*.[ch] src/tiermoe/native/isa/*.[ch] src/tiermoe/native/isa/*/*.h)
	@tools/environment .venv
	@touch $@

demo: $(STAMP)
	@echo "The shipped model has 256 experts. This run keeps 64 in memory and reads the others from disk as it needs them."
	$(BIN)/tiermoe plan $(MODEL) --cache 25% --context 256
	$(BIN)/tiermoe run $(MODEL) "Once upon a time" --cache 25% --max-tokens 120 --temperature 0.8 --seed 1

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# a process for each core, eight at most: each holds torch and transformers
test: lint
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

test-long: $(STAMP)
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m long

# one process: the tests share the GPU
test-gpu: $(STAMP)
	@$(BIN)/python -c "import sys, torch; from tiermoe.offload import cuda; torch.cuda.is_available() or sys.exit(cuda.why_no_gpu())"
	$(BIN)/pytest -k "real_gpu or (test_cases and gpu)"

# README.html is the first page; nothing is fetched, neither here nor by the pages
site: $(STAMP)
	$(BIN)/python -m sphinx -n -W --keep-going -q -c docs . build/site
	cp build/site/README.html build/site/index.html
	@echo "build/site/index.html"
