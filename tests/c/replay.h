/* What replay.c, replay.cpp and replay.py have in common: the same leaves and the same words.
 *
 * A trace is a text, one operation a line, with tokens FIRST, FIRST + 1, … and, from FORK on, other
 * ones. What does not apply (an id that is not live) fails, in all three languages alike.
 *
 *   admit ID FIRST COUNT FORK    append ID FIRST COUNT    resume ID
 *   step ID MOST [ID MOST]…      settle                   abandon
 *   fork PARENT CHILD            rewind ID TOKENS         preempt ID    release ID KEEP
 *
 * Each operation prints one line: what it answered, or the name of the error. A step plans
 * min(MOST, what is known and not planned) of each of its requests. */
#ifndef KVLEAF_TESTS_C_REPLAY_H
#define KVLEAF_TESTS_C_REPLAY_H

enum {
  replay_budget = 40 << 10,
  replay_page_tokens = 4,
  replay_max_len = 96,
  replay_max_step_tokens = 24,
  replay_max_batch = 8,
  replay_step_tokens = 192,
  replay_window = 12,
  replay_fork_shift = 10000
};

#endif
