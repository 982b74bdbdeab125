/* An allocation that fails, wherever it is, ends as an error: nothing crashes, and nothing is written in part.
 *
 * usage: oom_test GOLDEN SCRATCH NIBBLE SHIM POINTS
 *
 * For POINTS places, evenly spread over a run of the C interface and over each of several commands of NIBBLE, with SHIM
 * (failing_malloc.c) preloaded, one allocation fails there. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <nibble/nibble.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "failing_malloc.h"

static const char *golden, *scratch, *tool, *shim;
static int failures, aborted, points;

#define SIZED(type) \
  { .struct_size = sizeof(type) }
/* The rest of a step depends on it. */
#define TRY(call)                               \
  do {                                          \
    if ((status = (call)) != NIB_OK) goto done; \
  } while (0)

enum { M = 3, LONGEST = 512 };

/* Everything an engine does with a checkpoint, from opening to converting. */
static nib_status work(const char* in, const char* out) {
  static float a[M * LONGEST], d[M * LONGEST];
  static char workspace[1 << 20];
  nib_status status;
  nib_context* context = NULL;
  nib_checkpoint* checkpoint = NULL;
  nib_qtensor *q = NULL, *again = NULL, *rounded = NULL;
  nib_weight* weight = NULL;
  nib_plan *plan = NULL, *whole = NULL;
  char *notes = NULL, *report = NULL, *failure = NULL, *explained = NULL;

  nib_context_desc threads = SIZED(nib_context_desc);
  threads.threads = 3;
  TRY(nib_context_create(&threads, &context));
  TRY(nib_checkpoint_open(in, &checkpoint));
  TRY(nib_checkpoint_read(checkpoint, 0, &q, &notes));
  nib_qtensor_desc desc = SIZED(nib_qtensor_desc);
  TRY(nib_qtensor_get(q, &desc));
  nib_pack_desc packing = SIZED(nib_pack_desc);
  packing.context = context;
  TRY(nib_pack(q, &packing, &weight));
  TRY(nib_unpack(weight, &again));
  nib_linear_desc linear = SIZED(nib_linear_desc);
  linear.m_max = M;
  linear.act_scheme = "s8r";
  TRY(nib_plan_linear(weight, &linear, NULL, &plan));
  TRY(nib_plan_explain(plan, &explained));
  nib_operands operands = SIZED(nib_operands);
  const nib_view av = nib_matrix(a, NIB_F32, M, desc.k), dv = nib_matrix(d, NIB_F32, M, desc.n);
  operands.context = context;
  operands.a = &av;
  operands.d = &dv;
  TRY(nib_plan_run(plan, weight, &operands, workspace, sizeof workspace, NULL));
  TRY(nib_plan_dequantize(weight, NULL, NULL, &whole));
  nib_quantize_desc how = SIZED(nib_quantize_desc);
  how.scheme = "u4zg32";
  const nib_view w = nib_matrix(a, NIB_F32, M, 64);
  TRY(nib_quantize(context, &w, &how, &rounded));
  nib_quant_error error = SIZED(nib_quant_error);
  TRY(nib_quantization_error(context, &w, rounded, &error));
  nib_verify_desc verify = SIZED(nib_verify_desc);
  verify.context = context;
  verify.linear = &linear;
  verify.sample_columns = 2;
  nib_verify_report verified = SIZED(nib_verify_report);
  TRY(nib_verify(q, &verify, &verified, &failure));
  nib_transform_desc transform = SIZED(nib_transform_desc);
  transform.context = context;
  transform.format = "compressed-tensors";
  TRY(nib_checkpoint_convert(in, out, &transform, &report));
done:
  nib_text_free(notes);
  nib_text_free(report);
  nib_text_free(failure);
  nib_text_free(explained);
  nib_plan_destroy(plan);
  nib_plan_destroy(whole);
  nib_weight_destroy(weight);
  nib_qtensor_destroy(q);
  nib_qtensor_destroy(again);
  nib_qtensor_destroy(rounded);
  nib_checkpoint_destroy(checkpoint);
  nib_context_destroy(context);
  return status;
}

/* What is left in a directory but for one name, which may be there. */
static int leaves_more_than(const char* directory, const char* allowed) {
  DIR* const entries = opendir(directory);
  int more = 0;
  for (struct dirent* entry; entries != NULL && (entry = readdir(entries)) != NULL;)
    if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 && strcmp(entry->d_name, allowed) != 0) {
      printf("  left behind: %s\n", entry->d_name);
      more = 1;
    }
  if (entries != NULL) closedir(entries);
  return more;
}

static void clean(const char* directory) {
  char command[4200];
  snprintf(command, sizeof command, "rm -rf '%s' && mkdir -p '%s'", directory, directory);
  if (system(command) != 0) exit(2);
}

/* The destructor of nlohmann-json's values allocates, and cannot fail but by abort(): a few places in a thousand, which are counted. */
static int is_known(int code) { return code == -SIGABRT || code == 128 + SIGABRT ? ++aborted : 0; }

static void complain(const char* what, long n, const char* how, int code) {
  ++failures;
  printf("%s: allocation %ld fails: %s %d\n", what, n, how, code);
}

/* Runs in a child, which says the status it ended with. */
static int interface_in_child(const char* in, const char* out, long n, long* count) {
  int ends[2];
  if (pipe(ends) != 0) exit(2);
  const pid_t child = fork();
  if (child == 0) {
    alarm(300);
    fail_allocation(n);
    const nib_status status = work(in, out);
    const long seen = allocations();
    fail_allocation(0);
    if (status != NIB_OK && *nib_last_error() == '\0') _exit(98);
    if (write(ends[1], &seen, sizeof seen) != (ssize_t)sizeof seen) _exit(97);
    _exit(status);
  }
  close(ends[1]);
  if (read(ends[0], count, sizeof *count) != (ssize_t)sizeof *count) *count = 0;
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void test_interface(void) {
  char in[1024], directory[1024], out[1100];
  snprintf(in, sizeof in, "%s/awq/g128", golden);
  snprintf(directory, sizeof directory, "%s/interface", scratch);
  snprintf(out, sizeof out, "%s/out", directory);
  clean(directory);
  long total = 0, ignored = 0;
  const int plain = interface_in_child(in, out, 0, &total);
  if (plain != NIB_OK || total < 100) complain("the C interface", 0, "without a failure it ends with", plain);
  for (int i = 0; i < points; ++i) {
    const long n = 1 + total * i / points;
    if (rmdir(directory) != 0 || mkdir(directory, 0700) != 0) clean(directory);
    const int code = interface_in_child(in, out, n, &ignored);
    if (is_known(code)) continue;
    if (code != NIB_OK && code != NIB_IO_ERROR) complain("the C interface", n, "it ends with", code);
    if (leaves_more_than(directory, code == NIB_OK ? "out" : "")) complain("the C interface", n, "with", code);
  }
  printf("the C interface: %ld allocations\n", total);
}

/* Runs a command line of the tool; its exit code. */
static int command(const char* line, long n, const char* count) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(300);
    char text[32], log[1100];
    snprintf(text, sizeof text, "%ld", n);
    snprintf(log, sizeof log, "%s/log", scratch);
    if (n != 0) setenv("FAIL_ALLOCATION", text, 1);
    if (count != NULL) setenv("COUNT_ALLOCATIONS", count, 1);
    setenv("LD_PRELOAD", shim, 1);
    setenv("NIBBLE_NUM_THREADS", "3", 1);
    char* words[32] = {(char*)tool};
    static char copy[4096];
    snprintf(copy, sizeof copy, "%s", line);
    int i = 1;
    for (char* word = strtok(copy, " "); word != NULL && i < 31; word = strtok(NULL, " ")) words[i++] = word;
    const int to = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(to, 1);
    dup2(to, 2);
    execv(tool, words);
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void test_command(const char* line) {
  char directory[1024], count[1024];
  snprintf(directory, sizeof directory, "%s/command", scratch);
  snprintf(count, sizeof count, "%s/count", scratch);
  clean(directory);
  long total = 0;
  const int plain = command(line, 0, count);
  FILE* const file = fopen(count, "r");
  if (plain != 0 || file == NULL || fscanf(file, "%ld", &total) != 1 || total < 100)
    complain(line, 0, "without a failure it ends with", plain);
  if (file != NULL) fclose(file);
  for (int i = 0; i < points; ++i) {
    const long n = 1 + total * i / points;
    if (rmdir(directory) != 0 || mkdir(directory, 0700) != 0) clean(directory);
    const int code = command(line, n, NULL);
    if (is_known(code)) continue;
    if (code != 0 && code != 4) complain(line, n, "it ends with", code);
    if (leaves_more_than(directory, code == 0 ? "out" : "")) complain(line, n, "with", code);
  }
  printf("nibble %s: %ld allocations\n", line, total);
}

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  golden = argv[1], scratch = argv[2], tool = argv[3], shim = argv[4], points = atoi(argv[5]);
  setvbuf(stdout, NULL, _IONBF, 0);
  clean(scratch);
  test_interface();
  char line[4][3000];
  snprintf(line[0], sizeof line[0], "verify %s/awq/g128 -M 2", golden);
  snprintf(line[1], sizeof line[1], "convert %s/awq/g128 %s/command/out --format compressed-tensors", golden, scratch);
  snprintf(line[2], sizeof line[2], "dequantize %s/awq/g128 %s/command/out", golden, scratch);
  snprintf(line[3], sizeof line[3], "inspect %s/awq/g128 --explain", golden);
  for (int i = 0; i < 4; ++i) test_command(line[i]);
  printf("%d of %d points failed, %d ended in the JSON library\n", failures, points * 5, aborted);
  return failures != 0 || aborted > 2 + points * 5 / 50;
}
