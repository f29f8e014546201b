#define _GNU_SOURCE
#include "team.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* How a thread waits for a number that another thread changes: awake, or asleep where the system can do that. */
#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__) || defined(__arm__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() sched_yield()
#endif

#if defined(__linux__)

/* Sleeps until `wake_all`, unless *number is not `seen` any more; may return earlier. */
static inline void sleep_while(_Atomic uint32_t *number, uint32_t seen) {
    syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

/* Wakes who sleeps on the number, which has changed. */
static inline void wake_all(_Atomic uint32_t *number) {
    syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* In a forked process, which has none of the sleepers. */
static inline void forget_sleepers(void) {}

#else

/* One lock and one condition for every number: there is one team. */
static pthread_mutex_t waiting_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t waiting_changed = PTHREAD_COND_INITIALIZER;

static inline void sleep_while(_Atomic uint32_t *number, uint32_t seen) {
    pthread_mutex_lock(&waiting_lock);
    while (atomic_load(number) == seen) pthread_cond_wait(&waiting_changed, &waiting_lock);
    pthread_mutex_unlock(&waiting_lock);
}

static inline void wake_all(_Atomic uint32_t *number) {
    (void)number;
    pthread_mutex_lock(&waiting_lock); /* or a sleeper could have read the number and not wait yet */
    pthread_cond_broadcast(&waiting_changed);
    pthread_mutex_unlock(&waiting_lock);
}

static inline void forget_sleepers(void) {
    pthread_mutex_init(&waiting_lock, NULL);
    pthread_cond_init(&waiting_changed, NULL);
}

#endif

enum {
    SHARES = 4,         /* a thread takes this part of what would be its own of the tasks that are left */
    PAUSES = 64,        /* before a waiting thread offers its core to others */
    AWAKE_NS = 2000000, /* for which a thread without work stays awake: the calls of one token follow each other closely */
};

typedef struct {
    const Phase *phases;
    size_t count, threads;
    void *data;
    struct {
        atomic_size_t next, done;
    } progress[MOST_PHASES];
} Job;

static struct {
    pthread_mutex_t one_caller;
    _Atomic uint32_t calls;  /* begun so far; odd while threads may join */
    _Atomic uint32_t asleep, inside;
    Job *job;
    size_t workers;
} team = {.one_caller = PTHREAD_MUTEX_INITIALIZER};

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread)(void);
} openmp;

int team_join(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return 0;
    *(void **)&openmp.thread = dlsym(library, "omp_get_thread_num");
    if (openmp.thread) *(void **)&openmp.parallel = dlsym(library, "GOMP_parallel");
    return openmp.parallel != NULL;
}

static void rest(size_t round) {
    if (round < PAUSES)
        PAUSE();
    else
        sched_yield();
}

/* Tasks that follow each other, for one thread: returns the first and sets *end; *end is the first where none is left.
 * What they read often lies one after the other, so that a thread does better with several; they become fewer towards
 * the end, so that all threads finish together. */
static size_t take(Job *job, size_t p, size_t *end) {
    const size_t tasks = job->phases[p].tasks;
    size_t begin = atomic_load(&job->progress[p].next), some;
    do {
        if (begin >= tasks) return *end = begin;
        some = (tasks - begin) / (SHARES * job->threads);
        *end = begin + (some ? some : 1);
    } while (!atomic_compare_exchange_weak(&job->progress[p].next, &begin, *end));
    return begin;
}

static void work(Job *job, size_t thread) {
    for (size_t p = 0; p < job->count; p++) {
        const Phase *phase = &job->phases[p];
        int begun = phase->begin == NULL;
        for (size_t task, end; (task = take(job, p, &end)) < end;) {
            const size_t count = end - task;
            if (!begun) phase->begin(job->data, thread), begun = 1;
            for (; task < end; task++) phase->task(job->data, thread, task);
            atomic_fetch_add(&job->progress[p].done, count);
        }
        for (size_t round = 0; atomic_load(&job->progress[p].done) < phase->tasks; round++) rest(round);
    }
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Returns the number of a call that has begun after call `seen`. */
static uint32_t next_call(uint32_t seen) {
    uint32_t calls;
    int64_t begin = 0;
    for (size_t round = 0; (calls = atomic_load(&team.calls)) == seen || !(calls & 1); round++) {
        rest(round);
        if (round < PAUSES || round % PAUSES) continue;
        if (!begin) begin = now();
        if (now() - begin < AWAKE_NS) continue;
        atomic_fetch_add(&team.asleep, 1);
        sleep_while(&team.calls, calls);
        atomic_fetch_sub(&team.asleep, 1);
        begin = 0;
    }
    return calls;
}

static void *worker(void *number) {
    const size_t thread = (size_t)(uintptr_t)number;
    uint32_t seen = 0;
    for (;;) {
        seen = next_call(seen);
        atomic_fetch_add(&team.inside, 1);
        /* read again: the job lives as long as its call goes on and somebody is inside */
        if (atomic_load(&team.calls) == seen && thread < team.job->threads) work(team.job, thread);
        atomic_fetch_sub(&team.inside, 1);
    }
    return NULL;
}

/* A forked process has none of the threads. */
static void forget(void) {
    pthread_mutex_init(&team.one_caller, NULL);
    team.workers = 0;
    atomic_store(&team.calls, 0);
    atomic_store(&team.asleep, 0);
    atomic_store(&team.inside, 0);
    forget_sleepers();
}

static void hire(size_t threads) {
    if (team.workers == 0) pthread_atfork(NULL, NULL, forget);
    while (team.workers + 1 < threads && team.workers + 1 < MOST_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(uintptr_t)(team.workers + 1))) return; /* fewer will do */
        pthread_detach(thread);
        team.workers++;
    }
}

static void work_with_torch(void *job) { work(job, (size_t)openmp.thread()); }

void team_run(const Phase *phases, size_t count, void *data, size_t threads, Pool pool) {
    Job job = {.phases = phases, .count = count, .threads = threads, .data = data};
    if (pool == TORCHS && openmp.parallel && threads > 1) {
        openmp.parallel(work_with_torch, &job, (unsigned)threads, 0);
        return;
    }
    if (threads < 2 || pthread_mutex_trylock(&team.one_caller)) {
        work(&job, 0);
        return;
    }
    hire(threads);
    team.job = &job;
    atomic_fetch_add(&team.calls, 1);
    if (atomic_load(&team.asleep)) wake_all(&team.calls);
    work(&job, 0);
    atomic_fetch_add(&team.calls, 1);
    for (size_t round = 0; atomic_load(&team.inside); round++) rest(round);
    pthread_mutex_unlock(&team.one_caller);
}
