-- A live sequence in each thread, of one connection: wrk --threads=N --connections=N -s sequences.lua URL -- LENGTH
-- After LENGTH requests a sequence ends and the thread begins it anew; one that a run left unfinished is begun anew too.

local threads = 0

function setup(thread)
  threads = threads + 1
  thread:set("number", threads)
end

local step, length

function init(args)
  length = tonumber(args[1])
  -- wrk asks the first thread for a request that it only looks at.
  step = number == 1 and length - 1 or 0
end

function request()
  local body = string.format(
    '{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1,1],"data":[%d]}],"parameters":'
    .. '{"sequence_id":%d,"sequence_start":%s,"sequence_end":%s}}',
    step, number, tostring(step == 0), tostring(step == length - 1))
  step = (step + 1) % length
  return wrk.format("POST", nil, {["Content-Type"] = "application/json"}, body)
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    "\nRESULT %d %d %d %d %d\n", summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
