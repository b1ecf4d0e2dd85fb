/* Makes file operations fail on purpose, in a process that is started with LD_PRELOAD=shim.so FAULTS=FILE.

   FILE holds rules, one a line, and may change while the process runs:  OPERATION KIND PATTERN [TIMES]
     OPERATION  open (for writing), read, write, sync, close
     KIND       the name of an errno (ENOSPC, EDQUOT, EIO, EROFS, ESTALE), or hang, slow (0.2 s), short, garble
     PATTERN    a part of the path
     TIMES      how often; without it, for ever

   Python, TensorStore and ArrayRecord all go through these functions of libc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RULES 16
struct rule { char operation[8], kind[8], pattern[256]; long left; };
static struct rule rules[RULES];
static int count;
static struct timespec stamp;
static struct timespec looked;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void load(void) {
  const char *path = getenv("FAULTS");
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (!path || (now.tv_sec - looked.tv_sec) * 1000 + (now.tv_nsec - looked.tv_nsec) / 1000000 < 5) return;
  looked = now;
  struct stat st;
  if (stat(path, &st)) { count = 0; return; }
  if (st.st_mtim.tv_sec == stamp.tv_sec && st.st_mtim.tv_nsec == stamp.tv_nsec) return;
  stamp = st.st_mtim;
  char text[4096];
  int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  long size = syscall(SYS_read, fd, text, sizeof text - 1);
  syscall(SYS_close, fd);
  text[size > 0 ? size : 0] = 0;
  count = 0;
  char *rest = NULL;
  for (char *line = strtok_r(text, "\n", &rest); line && count < RULES; line = strtok_r(NULL, "\n", &rest)) {
    struct rule *r = &rules[count];
    r->left = -1;
    if (sscanf(line, "%7s %7s %255s %ld", r->operation, r->kind, r->pattern, &r->left) >= 3) count++;
  }
}

/* The kind of fault for an operation on a path; NULL for none. */
static const char *fault(const char *operation, const char *path) {
  const char *found = NULL;
  pthread_mutex_lock(&lock);
  load();
  for (int i = 0; i < count && !found; i++) {
    struct rule *r = &rules[i];
    if (!strcmp(r->operation, operation) && strstr(path, r->pattern) && r->left != 0) {
      if (r->left > 0) r->left--;
      found = r->kind;
    }
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static const char *fault_of(const char *operation, int fd) {
  if (!count && !getenv("FAULTS")) return NULL;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
  if (size <= 0) return NULL;
  path[size] = 0;
  return path[0] == '/' && strncmp(path, "/proc", 5) && strncmp(path, "/dev", 4) ? fault(operation, path) : NULL;
}

/* Waits as long as a rule says hang; true (and errno) if the operation must fail. */
static int fails(const char *kind, const char *operation, int fd) {
  static const struct { const char *name; int number; } errors[] = {
      {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EIO", EIO}, {"EROFS", EROFS}, {"ESTALE", ESTALE}};
  if (!kind) return 0;
  while (kind && !strcmp(kind, "hang")) { usleep(50000); kind = fault_of(operation, fd); }
  if (!kind) return 0;
  if (!strcmp(kind, "slow")) usleep(200000);
  for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
    if (!strcmp(kind, errors[i].name)) { errno = errors[i].number; return 1; }
  return 0;
}

static char *garbled(const char *kind, const void *buffer, size_t size) {
  if (!kind || strcmp(kind, "garble") || !size) return NULL;
  char *copy = malloc(size);
  memcpy(copy, buffer, size);
  for (size_t i = size / 2; i < size; i += 4096) copy[i] ^= 0x10;
  return copy;
}

#define SHORT(kind, size) ((kind) && !strcmp(kind, "short") && (size) > 1 ? (size) / 2 : (size))

ssize_t write(int fd, const void *buffer, size_t size) {
  const char *kind = fault_of("write", fd);
  if (fails(kind, "write", fd)) return -1;
  char *copy = garbled(kind, buffer, size);
  ssize_t done = REAL(write)(fd, copy ? copy : buffer, SHORT(kind, size));
  free(copy);
  return done;
}

ssize_t pwrite64(int fd, const void *buffer, size_t size, off64_t at) {
  const char *kind = fault_of("write", fd);
  if (fails(kind, "write", fd)) return -1;
  char *copy = garbled(kind, buffer, size);
  ssize_t done = REAL(pwrite64)(fd, copy ? copy : buffer, SHORT(kind, size), at);
  free(copy);
  return done;
}
ssize_t pwrite(int fd, const void *buffer, size_t size, off_t at) { return pwrite64(fd, buffer, size, at); }

ssize_t writev(int fd, const struct iovec *parts, int n) {
  const char *kind = fault_of("write", fd);
  if (fails(kind, "write", fd)) return -1;
  if (!kind || (strcmp(kind, "garble") && strcmp(kind, "short"))) return REAL(writev)(fd, parts, n);
  ssize_t total = 0;
  for (int i = 0; i < n; i++) {
    char *copy = garbled(kind, parts[i].iov_base, parts[i].iov_len);
    size_t size = SHORT(kind, parts[i].iov_len);
    ssize_t done = REAL(write)(fd, copy ? copy : parts[i].iov_base, size);
    free(copy);
    if (done < 0) return total ? total : -1;
    total += done;
    if (size != parts[i].iov_len) break;
  }
  return total;
}

ssize_t read(int fd, void *buffer, size_t size) {
  return fails(fault_of("read", fd), "read", fd) ? -1 : REAL(read)(fd, buffer, size);
}
ssize_t pread64(int fd, void *buffer, size_t size, off64_t at) {
  return fails(fault_of("read", fd), "read", fd) ? -1 : REAL(pread64)(fd, buffer, size, at);
}
ssize_t pread(int fd, void *buffer, size_t size, off_t at) { return pread64(fd, buffer, size, at); }

int fsync(int fd) { return fails(fault_of("sync", fd), "sync", fd) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fails(fault_of("sync", fd), "sync", fd) ? -1 : REAL(fdatasync)(fd); }

int close(int fd) {
  const char *kind = fault_of("close", fd);
  int bad = fails(kind, "close", fd), number = errno;
  int done = REAL(close)(fd);
  if (bad) { errno = number; return -1; }
  return done;
}

static int opens(const char *path, int flags) {
  if (!(flags & (O_WRONLY | O_RDWR | O_CREAT)) || !strncmp(path, "/dev", 4) || !strncmp(path, "/proc", 5)) return 1;
  const char *kind = fault("open", path);
  while (kind && !strcmp(kind, "hang")) { usleep(50000); kind = fault("open", path); }
  return !fails(kind, "none", -1);
}
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); }

int open64(const char *path, int flags, ...) { MODE(flags) return opens(path, flags) ? REAL(open64)(path, flags, mode) : -1; }
int open(const char *path, int flags, ...) { MODE(flags) return opens(path, flags) ? REAL(open64)(path, flags, mode) : -1; }
int openat64(int at, const char *path, int flags, ...) {
  MODE(flags) return opens(path, flags) ? REAL(openat64)(at, path, flags, mode) : -1;
}
int openat(int at, const char *path, int flags, ...) {
  MODE(flags) return opens(path, flags) ? REAL(openat64)(at, path, flags, mode) : -1;
}
