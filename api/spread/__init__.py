"""The repositories of a deployment of several Redis servers, in the place of those of one.

Each part looks up which server has a job or a model, and leaves the work to that server's own repository; lists are
merged. A deployment of one server uses none of this. See store/server_map.py.
"""
