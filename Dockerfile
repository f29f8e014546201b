# This file has not been built: the project was developed where no containers run.
#   docker build -t tiermoe .
#   docker run --rm -it -v tiermoe:/models tiermoe run Qwen/Qwen3-30B-A3B "Why is the sky blue?" --memory 6GiB
#   docker run --rm -v tiermoe:/models -p 8000:8000 tiermoe serve Qwen/Qwen3-30B-A3B --host 0.0.0.0
# The volume keeps downloads and packed stores. --memory of docker bounds tiermoe too.
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:3.13-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    wheel=$(echo /wheels/tiermoe-*.whl) && \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "$wheel[serve]" && \
    useradd --create-home tiermoe && install --directory --owner tiermoe /models
USER tiermoe
ENV TIERMOE_CACHE=/models/stores HF_HOME=/models/hub
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["tiermoe"]
CMD ["doctor"]
