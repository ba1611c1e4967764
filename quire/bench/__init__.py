"""`quire bench`: what a server or the engine in this process can do, measured from where its user stands.

`serve` asks any server of the OpenAI API over HTTP; `throughput` and `latency` run `quire.LLM`. Flags and the keys of
the JSON files are those of `vllm bench`, so that scripts and charts made for it go on working. Nothing of Quire
imports this package but the command line.

    options.py    every flag, once              client.py     one streamed request, timed
    workload.py   prompts and lengths by seed   load.py       many of them, by arrival times and concurrency
    files.py      prompts out of files          metrics.py    from timings to numbers
    arrivals.py   when requests are sent        report.py     the printed table, and JSON
    serve.py, throughput.py, latency.py         chart.py      PNG and SVG
"""
