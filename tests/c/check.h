/* The checks of the C tests: what does not hold is printed and counted, and the walk goes on. */
#ifndef KVLEAF_TESTS_C_CHECK_H
#define KVLEAF_TESTS_C_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kvleaf.h"

static int checks_passed, checks_failed;

static void check(int holds, const char* what, int line) {
  if (holds) {
    ++checks_passed;
    return;
  }
  ++checks_failed;
  printf("line %d: %s\n  last error: %s\n", line, what, kvleaf_last_error());
}

/* `call` fails with `status`, and its message has each of the parts, divided by '|'. */
static void check_fails(kvleaf_status got, kvleaf_status want, const char* parts, const char* what,
                        int line) {
  if (got != want) {
    ++checks_failed;
    printf("line %d: %s: %s, not %s\n  last error: %s\n", line, what, kvleaf_status_name(got),
           kvleaf_status_name(want), kvleaf_last_error());
    return;
  }
  while (*parts != '\0') {
    char part[128];
    size_t length = strcspn(parts, "|");
    memcpy(part, parts, length);
    part[length] = '\0';
    if (strstr(kvleaf_last_error(), part) == NULL) {
      ++checks_failed;
      printf("line %d: %s: no '%s' in: %s\n", line, what, part, kvleaf_last_error());
      return;
    }
    parts += length + (parts[length] == '|');
  }
  ++checks_passed;
}

#define CHECK(condition) check((condition) != 0, #condition, __LINE__)
#define OK(call) check((call) == KVLEAF_OK, #call, __LINE__)
#define FAILS(status, parts, call) check_fails((call), (status), (parts), #call, __LINE__)

#endif
