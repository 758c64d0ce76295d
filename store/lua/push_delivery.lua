-- include: backlog.lua
-- include: push_job.lua

-- True if a delivery goes to the backlog of its owner, so that one owner's thousands do not delay those of others.
local function can_wait_in_backlog(owner)
  return is_type(QUEUE_ .. WEBHOOKS, 'list') and is_type(FAIR_SHARE_ .. WEBHOOKS, 'zset') and is_type(DEFERRED_ .. WEBHOOKS, 'zset')
    and is_type(backlog_of(WEBHOOKS, owner), 'list') and goes_to_backlog(WEBHOOKS, LIST_LENGTH)
end

-- Queue a delivery, whose hash exists: a new one, one that is due again or one that is replayed.
local function push_delivery(owner, id, at)
  if can_wait_in_backlog(owner) then
    put_in_backlog(WEBHOOKS, owner, id, at)
  else
    push_job(WEBHOOKS, id, 0)
  end
end
