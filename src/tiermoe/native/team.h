/* A team of threads that shares out the tasks of one call.
 *
 * Nobody waits for a thread that has not come: whoever is there takes the next task, and a phase ends when its tasks are
 * done. So a core that another program, or a lane that reads experts, keeps busy costs its share of the work and no
 * more. (With OpenMP's barriers one busy core made decoding fifteen times slower: notebook/2026-11-21-native-kernels.md.)
 */
#ifndef TIERMOE_TEAM_H
#define TIERMOE_TEAM_H

#include <stddef.h>

typedef struct {
    void (*begin)(void *data, size_t thread);             /* before a thread's first task of the phase; NULL: nothing */
    void (*task)(void *data, size_t thread, size_t task); /* task 0 .. tasks - 1, in any order, on any thread */
    size_t tasks;
} Phase;

enum { MOST_PHASES = 10, MOST_THREADS = 256 };

/* OWN: threads of ours, for few tokens, where little of torch's runs between two calls. TORCHS: those of the OpenMP runtime
 * that torch uses, for many tokens: they stay awake for milliseconds after each of torch's operations, and other threads
 * would wait for their cores. */
typedef enum { OWN, TORCHS } Pool;

/* Looks OpenMP up in the library at `path`, already loaded. Returns 0 where it lacks a function; without one, TORCHS is
 * OWN. */
int team_join(const char *path);

/* Runs the phases one after the other on up to `threads` threads, numbered from 0. Calls from other threads at the same
 * time run on their own thread alone. */
void team_run(const Phase *phases, size_t count, void *data, size_t threads, Pool pool);

#endif
