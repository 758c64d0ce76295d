"""Check the images of requests, and fetch those that are given by URL, before their jobs are queued.

request with URLs ──fetched_images.py──► request with files     per owner: slots, and the bytes that are held
                        └──image_fetch.py──► one URL             on a thread, through store/ssrf_guard.py

What is queued holds files alone: a worker fetches nothing.
"""
