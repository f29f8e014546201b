/* A team of threads: those of the OpenMP runtime that torch has loaded, so that both share one pool. */
#ifndef TIERMOE_TEAM_H
#define TIERMOE_TEAM_H

#include <stdatomic.h>
#include <stddef.h>

/* The next task of a phase is taken by whichever thread is free: the other core may be busy reading experts. */
typedef atomic_size_t Tasks;

/* Looks the runtime up in the library at `path`, already loaded. Returns 0 where it lacks a function; then, and before
 * this call, work runs on the calling thread alone. */
int team_join(const char *path);

/* Runs `work(data)` on `threads` threads, the calling one included, and returns when all have ended. */
void team_run(void (*work)(void *), void *data, unsigned threads);

/* Inside `work`: which thread this is, how many there are; waits until all have come here. */
size_t team_rank(void);
size_t team_size(void);
void team_wait(void);

#endif
