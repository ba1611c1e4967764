"""`quire bench` measures a server, or the engine in this process, as its user sees it.

`serve` sends requests to any server of the OpenAI API; `throughput` and `latency` run `quire.LLM`. Flags and the keys
of the JSON files are those of `vllm bench`, so scripts and charts made for it keep working. Only the command line
imports this package.

    options.py    every flag, once              client.py     one streamed request, timed
    workload.py   prompts and lengths by seed   load.py       many of them, by arrival times and concurrency
    files.py      prompts out of files          metrics.py    from timings to numbers
    arrivals.py   when requests are sent        report.py     the printed table, and JSON
    serve.py, throughput.py, latency.py         chart.py      PNG and SVG
"""
