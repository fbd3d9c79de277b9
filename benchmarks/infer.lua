-- One inference request over and over: wrk -s infer.lua URL -- BODY_FILE "Header: value"...

function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
  for index = 2, #args do
    local name, value = args[index]:match("^([^:]+): (.*)$")
    wrk.headers[name] = value
  end
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    "\nRESULT %d %d %d %d %d\n", summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
