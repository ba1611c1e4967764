"""`quire bench` measures a server, or the engine in this process, as a user sees it.

`serve` sends requests to any server of the OpenAI API; `throughput` and `latency` run `quire.LLM`. Flags and the keys
of the JSON files are those of `vllm bench`, so scripts and charts made for it keep working. Only the command line
imports this package.

    options.py    every flag, once              client.py     one streamed request, timed
    workload.py   prompts and output lengths    load.py       many of them, at their arrival times
    files.py      prompts from files            metrics.py    latencies and rates from the timings
    arrivals.py   when requests are sent        report.py     the printed report, and JSON
    values.py     flags with a structure        chart.py      charts, PNG or SVG
    offline.py    the engine's flags            output_files.py   checks and writes files
    command.py, serve.py, throughput.py, latency.py           the commands
"""
