"""Grammars in processes of their own, so that none can hold up or exhaust the process that serves the model.

    engine's process                             fork server ──fork──► one process per grammar
    compiler ──► Grammars ──► GrammarProcess ◄─────── socket ─────────► compile, bitmasks
                 (compile queue)

fork_server        the other side: the tokenizer, forked for each grammar; limits on time and memory
fork_server_link   starts it, has it fork and kill
grammar_process    one grammar: compiled, asked for bitmasks, started again if it was ended by others
compile_queue      which grammar is compiled next: in turns between owners, short ones first
grammars           all of them: cached, bounded in number and memory, on one thread
"""
