# ddpperf with its environment, which runs the nightly command:
#
#   docker build --build-arg USER_ID="$(id -u)" -t ddpperf .
#   docker run --rm --gpus all --ipc=host -v "$PWD/results:/results" -v ddpperf-runs:/ddpperf/.ddpperf ddpperf
#
# torch brings its own CUDA libraries, so the smallest image with the driver's interface is enough.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${CUDA_IMAGE}

LABEL org.opencontainers.image.title="ddpperf" \
    org.opencontainers.image.description="Performance tests for data-parallel PyTorch training" \
    org.opencontainers.image.licenses="MIT"

# git checks out the baseline's commit. torch.compile needs a compiler with Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Files in /results belong to the user with this number.
ARG USER_ID=1000
RUN useradd --non-unique --uid "${USER_ID}" --create-home ddpperf \
    && install --directory --owner="${USER_ID}" /ddpperf /ddpperf/.ddpperf /results
USER ${USER_ID}
WORKDIR /ddpperf

# The requirements change less often than the code, so they are a layer of their own.
COPY --chown=${USER_ID} pyproject.toml README.md LICENSE ./
COPY --chown=${USER_ID} ddpperf/__init__.py ddpperf/__init__.py
RUN python3 -m venv .venv \
    && .venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --editable .

COPY --chown=${USER_ID} . .
VOLUME ["/results", "/ddpperf/.ddpperf"]
ENTRYPOINT ["/ddpperf/.venv/bin/python", "-m", "pytest", "--verdict=/results/verdict.md", \
    "--report=/results/report.html", "--junitxml=/results/junit.xml", "--benchmark-json=/results/run.json"]
CMD ["perf/", "--device=cuda", "--benchmark-compare"]
