/* A disk that fails, for tests: LD_PRELOAD it, and writes to files whose path contains $BAD_PATH fail as $BAD says,
   as long as the file $BAD_ON exists (always, if BAD_ON is not set).

   BAD: enospc, edquot, eio, erofs, estale   write() fails with this error
        fsync                                fsync() fails with EIO
        hang                                 write() never returns
        garble                               write() succeeds, and one bit of each long write is another on the disk */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LONG = 65, PIECES = 64 };

static int is(const char *kind) {
  const char *bad = getenv("BAD");
  return bad && !strcmp(bad, kind);
}

static int meant(int file) {
  const char *on = getenv("BAD_ON"), *part = getenv("BAD_PATH");
  if (!part || (on && access(on, F_OK))) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return strstr(path, part) != 0;
}

static int writes_fail(int file) { return !is("fsync") && !is("garble") && meant(file); }

static ssize_t fail(void) {
  while (is("hang")) sleep(1);
  errno = is("eio") ? EIO : is("edquot") ? EDQUOT : is("erofs") ? EROFS : is("estale") ? ESTALE : ENOSPC;
  return -1;
}

static void *garbled(const void *bytes, size_t size) {
  char *copy = malloc(size);
  memcpy(copy, bytes, size);
  copy[size / 2] ^= 8;
  return copy;
}

ssize_t write(int file, const void *bytes, size_t size) {
  ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
  if (writes_fail(file)) return fail();
  if (!is("garble") || size < LONG || !meant(file)) return real(file, bytes, size);
  void *copy = garbled(bytes, size);
  ssize_t written = real(file, copy, size);
  free(copy);
  return written;
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) {
  ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
  if (writes_fail(file)) return fail();
  if (!is("garble") || size < LONG || !meant(file)) return real(file, bytes, size, at);
  void *copy = garbled(bytes, size);
  ssize_t written = real(file, copy, size, at);
  free(copy);
  return written;
}

ssize_t writev(int file, const struct iovec *pieces, int count) {
  ssize_t (*real)(int, const struct iovec *, int) = dlsym(RTLD_NEXT, "writev");
  if (writes_fail(file)) return fail();
  if (!is("garble") || count > PIECES || !meant(file)) return real(file, pieces, count);
  struct iovec copies[PIECES];
  void *copy = 0;
  memcpy(copies, pieces, count * sizeof *pieces);
  for (int i = 0; i < count && !copy; i++)
    if (pieces[i].iov_len >= LONG) copies[i].iov_base = copy = garbled(pieces[i].iov_base, pieces[i].iov_len);
  ssize_t written = real(file, copies, count);
  free(copy);
  return written;
}

int fsync(int file) {
  int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
  if (!is("fsync") || !meant(file)) return real(file);
  errno = EIO;
  return -1;
}
