"""Speak SGLang's API: see generate_route.py and v1_score.py, because other servers have its paths too."""
