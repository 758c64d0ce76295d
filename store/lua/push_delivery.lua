-- include: backlog.lua
-- include: push_job.lua

-- Queue a delivery, whose hash exists: a new one or one that is replayed. It joins the backlog of its owner, so that one
-- owner's thousands do not delay those of others.
local function push_delivery(owner, id, at)
  if not join_backlog(WEBHOOKS, owner, id, at) then push_job(WEBHOOKS, id, 0) end
end
