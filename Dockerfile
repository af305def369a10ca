# conadv on a CPU: docker build -t conadv . && docker run --rm conadv train digits
# Not built by us yet.
FROM python:3.11-slim
WORKDIR /conadv
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY recipes recipes
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)" \
 && pip install --no-cache-dir -c constraints.txt '.[fast,study,tensorboard]' \
 && useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["conadv"]
CMD ["--help"]
