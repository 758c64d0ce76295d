-- include: owned_list.lua
--
-- List an item of an owner.
--
-- ARGV  key of the list, id of the item, when it was created (unix, s), seconds for which it is listed at least
add_to_list(unpack(ARGV))
