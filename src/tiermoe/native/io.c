#define _GNU_SOURCE
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "xxh3.h"

enum {
    PAGE = 4096,
    DRIVES = 2,
    MOST_THREADS = 64,
    SMALL = 1 << 17,       /* bytes */
    SIGNALS_NS = 50000000, /* after which a waiting thread looks for signals */
};

typedef enum { URGENT, SPECULATIVE, BACKGROUND, KINDS } Kind;

/* How a piece is read: through the page cache, where its pages stay or are dropped, past it, or by bringing in the pages
 * of a mapped file, of which the target is a part. */
typedef enum { CACHED, DROPPED, DIRECT, MAPPED } How;

/* `nbytes` at `offset` of a file that belong at byte `at` of the target. The second drive may have a copy of the file;
 * where it has none, its `file` is -1. */
typedef struct {
    int64_t offset, nbytes, at;
    struct {
        int32_t file, how;
    } on[DRIVES];
} Piece;

typedef struct {
    uint64_t checksum; /* XXH3, of all pieces in their order */
    int32_t checked, count;
    Piece pieces[];
} Request;

_Static_assert(sizeof(Piece) == 40 && sizeof(Request) == 16, "Python packs these");

typedef enum { DONE, SYSTEM, ENDS_EARLY, DAMAGED } Outcome;

/* How a read has ended, and of one that is not DONE: at which piece, and errno or the bytes that are missing. */
typedef struct {
    Outcome outcome;
    int64_t piece, detail;
} Result;

typedef struct Load {
    struct Load *next;
    uint64_t number;
    Kind kind;
    char *target;
    PyObject *bytes; /* which hold the request */
    const Request *request;
    int drive; /* whose result it has; where that is the second drive's and not DONE, the first has given the load */
    Result result;
} Load;

typedef struct {
    Load *first, **end;
} Queue;

/* Page-aligned memory of one thread. */
typedef struct {
    char *bytes;
    size_t size;
} Buffer;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t lock;
    pthread_cond_t asked, ended;
    Queue queues[KINDS], finished;
    pthread_t threads[MOST_THREADS];
    int count, closed, open;
    int limit; /* reads at once */
    int reading, sleeping, in_background;
    int asked_for, floor; /* loads that have not ended; the link is crowded while they are more than `floor` */
    int64_t crowded, crowded_since, moved, moved_before, ended_crowded; /* ns; bytes; loads */
    Buffer own; /* of who waits and reads meanwhile */
    int64_t bytes_read, busy, busy_since, waited;
    int64_t under_way[DRIVES]; /* bytes */
    double ratio;              /* the second drive's bandwidth in the first one's; 0: there is one drive */
} IOThreads;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void append(Queue *queue, Load *load) {
    load->next = NULL;
    if (!queue->first) queue->end = &queue->first;
    *queue->end = load;
    queue->end = &load->next;
}

static Load *pop(Queue *queue) {
    Load *load = queue->first;
    if (load && !(queue->first = load->next)) queue->end = &queue->first;
    return load;
}

/* Room for `size` bytes, or NULL. */
static char *room(Buffer *buffer, size_t size) {
    if (buffer->size >= size) return buffer->bytes;
    void *bytes;
    free(buffer->bytes);
    *buffer = (Buffer){NULL, 0};
    if (posix_memalign(&bytes, PAGE, size)) return NULL;
    *buffer = (Buffer){bytes, size};
    return bytes;
}

/* Fills the parts, one after the other, with at least `wanted` bytes from `offset` on (a direct read may ask for the rest
 * of a page too). */
static Outcome read_fully(Result *result, int file, struct iovec *parts, int count, int64_t offset, int64_t wanted) {
    for (int64_t done = 0; done < wanted;) {
        const ssize_t some = preadv(file, parts, count, offset + done);
        if (some < 0 && errno == EINTR) continue;
        if (some < 0) return result->detail = errno, SYSTEM;
        if (some == 0) return result->detail = wanted - done, ENDS_EARLY;
        done += some;
        for (size_t left = (size_t)some; left;) {
            const size_t of_first = parts->iov_len < left ? parts->iov_len : left;
            parts->iov_base = (char *)parts->iov_base + of_first, parts->iov_len -= of_first, left -= of_first;
            if (!parts->iov_len && count > 1) parts++, count--;
        }
    }
    return DONE;
}

/* Whether a piece lies in the target's pages as in the file's, so that past the page cache only its first and its last
 * page, which it shares with others, are copied; else all of it is. */
static int in_place(const Piece *piece) { return piece->offset % PAGE == piece->at % PAGE && piece->nbytes >= 2 * PAGE; }

/* Past the page cache whole pages are read. */
static Outcome read_direct(Result *result, const Piece *piece, int file, char *target, Buffer *buffer) {
    const int64_t before = piece->offset % PAGE, start = piece->offset - before;
    if (in_place(piece)) {
        const int64_t head = (PAGE - before) % PAGE, tail = (piece->nbytes - head) % PAGE;
        char *edges = head || tail ? room(buffer, 2 * PAGE) : NULL;
        if ((head || tail) && !edges) return result->detail = ENOMEM, SYSTEM;
        struct iovec parts[3];
        int count = 0;
        if (head) parts[count++] = (struct iovec){edges, PAGE};
        parts[count++] = (struct iovec){target + head, (size_t)(piece->nbytes - head - tail)};
        if (tail) parts[count++] = (struct iovec){edges + PAGE, PAGE};
        const Outcome outcome = read_fully(result, file, parts, count, start, before + piece->nbytes);
        if (head) memcpy(target, edges + before, (size_t)head);
        if (tail) memcpy(target + piece->nbytes - tail, edges + PAGE, (size_t)tail);
        return outcome;
    }
    const size_t pages = (size_t)((before + piece->nbytes + PAGE - 1) / PAGE * PAGE);
    char *bytes = room(buffer, pages);
    if (!bytes) return result->detail = ENOMEM, SYSTEM;
    struct iovec whole = {bytes, pages};
    const Outcome outcome = read_fully(result, file, &whole, 1, start, before + piece->nbytes);
    memcpy(target, bytes + before, (size_t)piece->nbytes);
    return outcome;
}

/* Reads what could not be brought in, to no use: that brings the pages too, or says what is wrong with them, where
 * touching a page of the mapping would end the process. */
static Outcome read_elsewhere(Result *result, const Piece *piece, int file, Buffer *buffer) {
    const int64_t most = 1 << 20;
    char *bytes = room(buffer, (size_t)most);
    if (!bytes) return result->detail = ENOMEM, SYSTEM;
    for (int64_t done = 0; done < piece->nbytes; done += most) {
        const int64_t some = piece->nbytes - done < most ? piece->nbytes - done : most;
        struct iovec part = {bytes, (size_t)some};
        const Outcome outcome = read_fully(result, file, &part, 1, piece->offset + done, some);
        if (outcome != DONE) return outcome;
    }
    return DONE;
}

static Outcome bring_in(Result *result, const Piece *piece, int file, char *target, Buffer *buffer) {
#ifdef MADV_POPULATE_READ
    if (!madvise(target, (size_t)piece->nbytes, MADV_POPULATE_READ)) return DONE;
#else
    (void)target;
#endif
    return read_elsewhere(result, piece, file, buffer);
}

static Outcome read_piece(Load *load, const Piece *piece, Buffer *buffer) {
    Result *result = &load->result;
    const int file = piece->on[load->drive].file;
    const How how = piece->on[load->drive].how;
    char *target = load->target + piece->at;
    if (how == DIRECT) return read_direct(result, piece, file, target, buffer);
    if (how == MAPPED) return bring_in(result, piece, file, target, buffer);
    struct iovec part = {target, (size_t)piece->nbytes};
    const Outcome outcome = read_fully(result, file, &part, 1, piece->offset, piece->nbytes);
#ifdef POSIX_FADV_DONTNEED
    if (how == DROPPED) posix_fadvise(file, piece->offset, piece->nbytes, POSIX_FADV_DONTNEED);
#endif
    return outcome;
}

static Outcome run(Load *load, Buffer *buffer) {
    const Request *request = load->request;
    load->result = (Result){DONE, 0, 0};
    for (int32_t p = 0; p < request->count; p++) {
        load->result.piece = p;
        const Outcome outcome = read_piece(load, &request->pieces[p], buffer);
        if (outcome != DONE) return load->result.outcome = outcome;
    }
    if (request->checked) {
        Xxh3 state;
        xxh3_begin(&state);
        for (int32_t p = 0; p < request->count; p++)
            xxh3_update(&state, load->target + request->pieces[p].at, (size_t)request->pieces[p].nbytes);
        if (xxh3_digest(&state) != request->checksum) load->result.outcome = DAMAGED;
    }
    return load->result.outcome;
}

static int64_t bytes_of(const Load *load) {
    int64_t nbytes = 0;
    for (int32_t p = 0; p < load->request->count; p++) nbytes += load->request->pieces[p].nbytes;
    return nbytes;
}

/* The drive that ends a load sooner, beside what it is reading; under the lock. */
static int soonest(const IOThreads *io, const Load *load) {
    const int64_t *under_way = io->under_way, nbytes = bytes_of(load);
    if (load->request->pieces[0].on[1].file < 0) return 0;
    return (double)(under_way[1] + nbytes) < (double)(under_way[0] + nbytes) * io->ratio;
}

/* A load begins or ends; under the lock. */
static void count_reading(IOThreads *io, int change) {
    if (change > 0 && !io->reading) io->busy_since = now();
    io->reading += change;
    if (change < 0 && !io->reading) io->busy += now() - io->busy_since;
}

/* Bytes that reads have moved: of those under way half is there, on average. */
static int64_t moved(const IOThreads *io) {
    return io->bytes_read + (io->under_way[0] + io->under_way[1]) / 2;
}

/* The link may have become crowded, or no longer is; under the lock. */
static void count_crowd(IOThreads *io, int was_crowded) {
    const int crowded = io->asked_for > io->floor;
    if (crowded && !was_crowded) io->crowded_since = now(), io->moved_before = moved(io);
    if (!crowded && was_crowded) io->crowded += now() - io->crowded_since, io->moved += moved(io) - io->moved_before;
}

/* A load is asked for, has ended or was taken back; under the lock. */
static void count_asked(IOThreads *io, int change) {
    const int was_crowded = io->asked_for > io->floor;
    io->asked_for += change;
    count_crowd(io, was_crowded);
}

/* Runs a load that was taken from its queue: gives the lock up meanwhile. What the second drive fails to give is read
 * from the first. */
static void work(IOThreads *io, Load *load, Buffer *buffer) {
    const int drive = load->drive = soonest(io, load);
    const int64_t nbytes = bytes_of(load);
    io->under_way[drive] += nbytes;
    count_reading(io, 1);
    pthread_mutex_unlock(&io->lock);
    if (run(load, buffer) != DONE && drive) {
        const Result copy = load->result;
        load->drive = 0;
        if (run(load, buffer) == DONE) load->drive = drive, load->result = copy;
    }
    pthread_mutex_lock(&io->lock);
    count_reading(io, -1);
    io->under_way[drive] -= nbytes;
    if (load->drive || load->result.outcome == DONE || load->result.outcome == DAMAGED) io->bytes_read += nbytes;
    io->ended_crowded += io->asked_for > io->floor;
    count_asked(io, -1);
    append(&io->finished, load);
}

/* No more than `limit` are read at once, whoever waits among them. Of several reads one is never in the background, so
 * that an urgent one never waits for these. */
static Load *next_load(IOThreads *io) {
    if (io->reading >= io->limit) return NULL;
    Load *load = pop(&io->queues[URGENT]);
    if (!load) load = pop(&io->queues[SPECULATIVE]);
    if (!load && io->in_background < (io->limit > 1 ? io->limit - 1 : 1) && (load = pop(&io->queues[BACKGROUND])))
        io->in_background++;
    return load;
}

static void *serve(void *data) {
    IOThreads *io = data;
    Buffer buffer = {NULL, 0};
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "tiermoe-io");
#elif defined(__APPLE__)
    pthread_setname_np("tiermoe-io");
#endif
    pthread_mutex_lock(&io->lock);
    while (!io->closed) {
        Load *load = next_load(io);
        if (!load) {
            io->sleeping++;
            pthread_cond_wait(&io->asked, &io->lock);
            io->sleeping--;
            continue;
        }
        work(io, load, &buffer);
        if (load->kind == BACKGROUND) io->in_background--;
        pthread_mutex_unlock(&io->lock);
        pthread_cond_signal(&io->ended); /* without the lock, for which the thread would have to wait */
        pthread_mutex_lock(&io->lock);
    }
    pthread_mutex_unlock(&io->lock);
    free(buffer.bytes);
    return NULL;
}

static void let_go(Load *load) {
    Py_DECREF(load->bytes);
    free(load);
}

static int clear(Queue *queue) {
    int count = 0;
    for (Load *load; (load = pop(queue)); count++) let_go(load);
    return count;
}

/* Drops what is queued, and returns when what has begun has ended. */
static void quiet(IOThreads *io) {
    pthread_mutex_lock(&io->lock);
    for (int kind = 0; kind < KINDS; kind++) count_asked(io, -clear(&io->queues[kind]));
    pthread_mutex_unlock(&io->lock);
    Py_BEGIN_ALLOW_THREADS /* never waited for under the lock: who has the interpreter may wait for the lock */
    pthread_mutex_lock(&io->lock);
    while (io->reading) pthread_cond_wait(&io->ended, &io->lock);
    pthread_mutex_unlock(&io->lock);
    Py_END_ALLOW_THREADS
    pthread_mutex_lock(&io->lock);
    clear(&io->finished);
    pthread_mutex_unlock(&io->lock);
}

static void end(IOThreads *io) {
    if (!io->open) return;
    io->open = 0;
    quiet(io);
    pthread_mutex_lock(&io->lock);
    io->closed = 1;
    pthread_cond_broadcast(&io->asked);
    pthread_mutex_unlock(&io->lock);
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < io->count; i++) pthread_join(io->threads[i], NULL);
    Py_END_ALLOW_THREADS
    free(io->own.bytes);
    io->own = (Buffer){NULL, 0};
}

/* What Python gets of a finished load: its number, or a tuple where it failed, or the second drive was read. Frees it. */
static PyObject *handed_out(Load *load) {
    const Result *result = &load->result;
    PyObject *handed = result->outcome == DONE && !load->drive
                           ? PyLong_FromUnsignedLongLong(load->number)
                           : Py_BuildValue("(KiLLi)", (unsigned long long)load->number, (int)result->outcome,
                                           (long long)result->piece, (long long)result->detail, load->drive);
    let_go(load);
    return handed;
}

static int is_open(IOThreads *io) {
    if (!io->open) PyErr_SetString(PyExc_ValueError, "these threads were closed");
    return io->open;
}

/* Whether a load takes no memory to speak of beside its target, so that whoever waits for it may read it. */
static int own(const Load *load) {
    for (int32_t p = 0; p < load->request->count; p++) {
        const Piece *piece = &load->request->pieces[p];
        if ((piece->on[0].how == DIRECT || piece->on[1].how == DIRECT) && !in_place(piece)) return 0;
    }
    return 1;
}

/* Whether reading it takes no longer than waking a thread: it is left to whoever will wait for it, unless others come. */
static int is_small(const Load *load) {
    return bytes_of(load) <= SMALL && load->request->pieces[0].on[0].how != MAPPED && own(load);
}

static PyObject *io_submit(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    IOThreads *io = (IOThreads *)self;
    if (count != 4 || !PyBytes_Check(args[3])) return PyErr_Format(PyExc_TypeError, "submit(number, kind, address, request)");
    const unsigned long long number = PyLong_AsUnsignedLongLong(args[0]), address = PyLong_AsUnsignedLongLong(args[2]);
    const long kind = PyLong_AsLong(args[1]);
    if (PyErr_Occurred() || !is_open(io)) return NULL;
    const Request *request = (const Request *)PyBytes_AsString(args[3]);
    const Py_ssize_t size = PyBytes_Size(args[3]);
    if (kind < 0 || kind >= KINDS || size < (Py_ssize_t)sizeof *request || request->count < 1 ||
        size != (Py_ssize_t)(sizeof *request + (size_t)request->count * sizeof *request->pieces))
        return PyErr_Format(PyExc_ValueError, "not a request");
    Load *load = malloc(sizeof *load);
    if (!load) return PyErr_NoMemory();
    *load = (Load){.number = number, .kind = (Kind)kind, .target = (char *)(uintptr_t)address, .bytes = Py_NewRef(args[3]),
                   .request = request};
    pthread_mutex_lock(&io->lock);
    const int alone = kind == URGENT && is_small(load) && !io->queues[URGENT].first;
    append(&io->queues[kind], load);
    count_asked(io, 1);
    const int wakes = io->sleeping && !alone;
    pthread_mutex_unlock(&io->lock);
    if (wakes) pthread_cond_signal(&io->asked); /* without the lock, for which the thread would have to wait */
    Py_RETURN_NONE;
}

/* Reads what is urgent and has not begun, else sleeps until something has ended or signals are looked for; under the
 * lock. */
static void await(IOThreads *io) {
    if (io->finished.first) return;
    if (io->reading < io->limit && io->queues[URGENT].first && own(io->queues[URGENT].first)) {
        Load *load = pop(&io->queues[URGENT]);
        work(io, load, &io->own);
        if (io->sleeping && (io->queues[URGENT].first || io->queues[SPECULATIVE].first || io->queues[BACKGROUND].first))
            pthread_cond_signal(&io->asked);
        return;
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += SIGNALS_NS;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_cond_timedwait(&io->ended, &io->lock, &until);
}

static PyObject *taken(IOThreads *io) {
    pthread_mutex_lock(&io->lock);
    Load *load = pop(&io->finished);
    pthread_mutex_unlock(&io->lock);
    if (load) return handed_out(load);
    Py_RETURN_NONE;
}

static PyObject *io_wait(PyObject *self, PyObject *none) {
    IOThreads *io = (IOThreads *)self;
    (void)none;
    if (!is_open(io)) return NULL;
    const int64_t began = now();
    PyObject *result = taken(io);
    while (result == Py_None) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&io->lock);
        await(io);
        pthread_mutex_unlock(&io->lock);
        Py_END_ALLOW_THREADS
        result = PyErr_CheckSignals() || !is_open(io) ? NULL : taken(io);
    }
    io->waited += now() - began;
    return result;
}

static PyObject *io_poll(PyObject *self, PyObject *none) {
    (void)none;
    return taken((IOThreads *)self);
}

static PyObject *io_recall(PyObject *self, PyObject *none) {
    IOThreads *io = (IOThreads *)self;
    PyObject *numbers = PyList_New(0);
    (void)none;
    pthread_mutex_lock(&io->lock);
    for (Load *load; numbers && (load = pop(&io->queues[SPECULATIVE]));) {
        PyObject *number = PyLong_FromUnsignedLongLong(load->number);
        count_asked(io, -1);
        if (!number || PyList_Append(numbers, number)) Py_CLEAR(numbers);
        Py_XDECREF(number);
        let_go(load);
    }
    pthread_mutex_unlock(&io->lock);
    return numbers;
}

static PyObject *io_withdraw(PyObject *self, PyObject *argument) {
    IOThreads *io = (IOThreads *)self;
    const unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&io->lock);
    Load **place = &io->queues[BACKGROUND].first, *load;
    while (*place && (*place)->number != number) place = &(*place)->next;
    if ((load = *place) && !(*place = load->next)) io->queues[BACKGROUND].end = place;
    if (load) count_asked(io, -1);
    pthread_mutex_unlock(&io->lock);
    if (load) let_go(load);
    return PyBool_FromLong(load != NULL);
}

static PyObject *io_drop(PyObject *self, PyObject *none) {
    (void)none;
    if (((IOThreads *)self)->open) quiet((IOThreads *)self);
    Py_RETURN_NONE;
}

static PyObject *io_close(PyObject *self, PyObject *none) {
    (void)none;
    end((IOThreads *)self);
    Py_RETURN_NONE;
}

static PyObject *io_counters(PyObject *self, PyObject *none) {
    IOThreads *io = (IOThreads *)self;
    (void)none;
    pthread_mutex_lock(&io->lock);
    const int64_t busy = io->busy + (io->reading ? now() - io->busy_since : 0);
    PyObject *result =
        Py_BuildValue("(Ldd)", (long long)io->bytes_read, busy * 1e-9, io->waited * 1e-9);
    pthread_mutex_unlock(&io->lock);
    return result;
}

static PyObject *io_allow(PyObject *self, PyObject *args) {
    IOThreads *io = (IOThreads *)self;
    int limit, floor;
    if (!PyArg_ParseTuple(args, "ii", &limit, &floor)) return NULL;
    if (limit < 1 || limit > io->count) return PyErr_Format(PyExc_ValueError, "1 to %d reads at once, not %d", io->count, limit);
    pthread_mutex_lock(&io->lock);
    io->limit = limit, io->floor = floor;
    io->crowded = io->moved = io->ended_crowded = 0;
    count_crowd(io, 0);
    pthread_cond_broadcast(&io->asked);
    pthread_mutex_unlock(&io->lock);
    Py_RETURN_NONE;
}

static PyObject *io_crowded(PyObject *self, PyObject *none) {
    IOThreads *io = (IOThreads *)self;
    (void)none;
    pthread_mutex_lock(&io->lock);
    const int crowded = io->asked_for > io->floor;
    const int64_t took = io->crowded + (crowded ? now() - io->crowded_since : 0);
    const int64_t bytes = io->moved + (crowded ? moved(io) - io->moved_before : 0), ended = io->ended_crowded;
    pthread_mutex_unlock(&io->lock);
    return Py_BuildValue("(LdL)", (long long)bytes, took * 1e-9, (long long)ended);
}

static PyObject *io_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    int count;
    double ratio = 0;
    if (named && PyDict_Size(named)) return PyErr_Format(PyExc_TypeError, "IOThreads takes no names");
    if (!PyArg_ParseTuple(args, "i|d", &count, &ratio)) return NULL;
    if (count < 1 || count > MOST_THREADS) return PyErr_Format(PyExc_ValueError, "1 to %d threads, not %d", MOST_THREADS, count);
    IOThreads *io = (IOThreads *)PyType_GenericAlloc(type, 0);
    if (!io) return NULL;
    io->ratio = ratio;
    io->limit = io->floor = count;
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->asked, NULL);
    pthread_cond_init(&io->ended, NULL);
    int error = 0;
    pthread_mutex_lock(&io->lock); /* threads look at the count */
    while (io->count < count && !(error = pthread_create(&io->threads[io->count], NULL, serve, io))) io->count++;
    pthread_mutex_unlock(&io->lock);
    io->open = 1;
    if (!error) return (PyObject *)io;
    Py_DECREF(io);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static void io_dealloc(PyObject *self) {
    IOThreads *io = (IOThreads *)self;
    PyTypeObject *type = Py_TYPE(self);
    end(io);
    pthread_cond_destroy(&io->ended);
    pthread_cond_destroy(&io->asked);
    pthread_mutex_destroy(&io->lock);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"submit", (PyCFunction)(void (*)(void))io_submit, METH_FASTCALL, "submit(number, kind, address, request)"},
    {"wait", io_wait, METH_NOARGS, "wait() -> the number of a load that has ended, or a tuple; see _native.pyi"},
    {"poll", io_poll, METH_NOARGS, "poll() -> as wait, None where nothing has ended"},
    {"recall", io_recall, METH_NOARGS, "recall() -> the numbers of the speculative loads, which had not begun"},
    {"withdraw", io_withdraw, METH_O, "withdraw(number) -> whether the background load had not begun"},
    {"drop", io_drop, METH_NOARGS, "drop(): what is queued, and what has ended when all that had begun has"},
    {"close", io_close, METH_NOARGS, "close(): drop, and the threads end"},
    {"counters", io_counters, METH_NOARGS,
     "counters() -> bytes read, and in seconds: busy; waited"},
    {"allow", io_allow, METH_VARARGS, "allow(reads at once, loads beyond which the link is crowded)"},
    {"crowded", io_crowded, METH_NOARGS, "crowded() -> while it was crowded since `allow`: bytes moved, seconds, loads that ended"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Threads that read experts into memory; see _native.pyi."},
    {Py_tp_new, io_new},
    {Py_tp_dealloc, io_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"tiermoe.native._native.IOThreads", sizeof(IOThreads), 0, Py_TPFLAGS_DEFAULT, slots};

PyObject *io_threads_type(void) { return PyType_FromSpec(&spec); }
