/* A failing allocation, wherever it is, ends as an error that says so: no crash, and no partial output.
 *
 * usage: oom_test GOLDEN SCRATCH NIBBLE SHIM POINTS
 *
 * For POINTS places, evenly spread over a run of the C interface and over each of several commands of NIBBLE, with SHIM
 * (failing_malloc.c) preloaded, the allocation there fails: once alone, once with all that follow. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <nibble/nibble.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "failing_malloc.h"

static const char *golden, *scratch, *tool, *shim;
static int failures, points, runs;

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
  nib_plan *plan = NULL, *cached = NULL, *whole = NULL;
  nib_plan_cache* cache = NULL;
  nib_experts* experts = NULL;
  nib_grouped_plan* grouped = NULL;
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
  TRY(nib_plan_cache_create(0, &cache));
  TRY(nib_plan_cache_linear(cache, weight, &linear, NULL, &cached));
  nib_operands operands = SIZED(nib_operands);
  const nib_view av = nib_matrix(a, NIB_F32, M, desc.k), dv = nib_matrix(d, NIB_F32, M, desc.n);
  operands.context = context;
  operands.a = &av;
  operands.d = &dv;
  TRY(nib_plan_run(plan, weight, &operands, workspace, sizeof workspace, NULL));
  const nib_qtensor* const twice[] = {q, q};
  const int32_t offsets[] = {0, 1, M};
  const nib_view sorted = nib_vector(offsets, NIB_S32, 3);
  nib_expert_rows rows = SIZED(nib_expert_rows);
  rows.offsets = &sorted;
  TRY(nib_pack_experts(twice, 2, &packing, &experts));
  TRY(nib_plan_grouped(experts, &linear, NULL, &grouped));
  TRY(nib_grouped_plan_run(grouped, experts, &rows, &operands, workspace, sizeof workspace, NULL));
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
  nib_plan_destroy(cached);
  nib_plan_cache_destroy(cache);
  nib_grouped_plan_destroy(grouped);
  nib_experts_destroy(experts);
  nib_plan_destroy(whole);
  nib_weight_destroy(weight);
  nib_qtensor_destroy(q);
  nib_qtensor_destroy(again);
  nib_qtensor_destroy(rounded);
  nib_checkpoint_destroy(checkpoint);
  nib_context_destroy(context);
  return status;
}

/* Whether a directory holds anything but the complete output "out", which may exist although there was no memory left to report it. */
static int holds_parts(const char* directory) {
  DIR* const entries = opendir(directory);
  int parts = 0;
  for (struct dirent* entry; entries != NULL && (entry = readdir(entries)) != NULL;) {
    char path[1200];
    snprintf(path, sizeof path, "%s/%s/.nibble", directory, entry->d_name);
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
    if (strcmp(directory, scratch) == 0 && entry->d_name[0] != '.') continue; /* of this test */
    if (strcmp(entry->d_name, "out") == 0 && (entry->d_type != DT_DIR || access(path, F_OK) == 0)) continue;
    printf("  left behind: %s\n", entry->d_name);
    parts = 1;
  }
  if (entries != NULL) closedir(entries);
  return parts;
}

static void clean(const char* directory) {
  char command[4200];
  snprintf(command, sizeof command, "rm -rf '%s' && mkdir -p '%s'", directory, directory);
  if (system(command) != 0) exit(2);
}

static void complain(const char* what, long n, int for_good, const char* how, int code) {
  ++failures;
  printf("%s: allocation %ld fails%s: %s %d\n", what, n, for_good ? " for good" : "", how, code);
}

/* The messages about lack of memory, of nibble and of the system. */
static int tells_memory(const char* message) { return strstr(message, "memory") != NULL || strstr(message, "Resource") != NULL; }

/* Runs in a child process, and returns its status. */
static int interface_in_child(const char* in, const char* out, long n, int for_good, long* count) {
  int ends[2];
  if (pipe(ends) != 0) exit(2);
  const pid_t child = fork();
  if (child == 0) {
    alarm(300);
    fail_allocation(n, for_good);
    const nib_status status = work(in, out);
    const long seen = allocations();
    fail_allocation(0, 0);
    if (status != NIB_OK && !tells_memory(nib_last_error())) {
      printf("  the message is: %s\n", nib_last_error());
      _exit(98);
    }
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
  const int plain = interface_in_child(in, out, 0, 0, &total);
  if (plain != NIB_OK || total < 100) complain("the C interface", 0, 0, "without a failure it ends with", plain);
  for (int i = 0; i < 2 * points; ++i) {
    const long n = 1 + total * (i / 2) / points;
    const int for_good = i % 2;
    if (rmdir(directory) != 0 || mkdir(directory, 0700) != 0) clean(directory);
    ++runs;
    const int code = interface_in_child(in, out, n, for_good, &ignored);
    if (code != NIB_OK && code != NIB_IO_ERROR) complain("the C interface", n, for_good, "it ends with", code);
    if (holds_parts(directory)) complain("the C interface", n, for_good, "with", code);
  }
  printf("the C interface: %ld allocations\n", total);
}

/* Runs a command line of the tool; its exit code. */
static int command(const char* line, long n, int for_good, const char* count) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(300);
    char text[32], log[1100];
    snprintf(text, sizeof text, for_good ? "%ld+" : "%ld", n);
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

/* Whether the last command reported lack of memory; prints its message otherwise. */
static int said_memory(void) {
  char path[1100], said[4096];
  snprintf(path, sizeof path, "%s/log", scratch);
  FILE* const file = fopen(path, "r");
  said[file == NULL ? 0 : fread(said, 1, sizeof said - 1, file)] = '\0';
  if (file != NULL) fclose(file);
  const int memory = tells_memory(said);
  if (!memory) printf("  the message is: %s\n", said);
  return memory;
}

/* Further inputs and outputs of the commands: a float model, a quantized one, and results of benchmarks. */
static void prepare(void) {
  char line[3000], path[1100];
  snprintf(line, sizeof line, "dequantize %s/awq/g128 %s/model", golden, scratch);
  const int code = command(line, 0, 0, NULL);
  if (code != 0) complain(line, 0, 0, "without a failure it ends with", code);
  snprintf(line, sizeof line, "quantize %s/model %s/again --format awq", scratch, scratch);
  const int again = command(line, 0, 0, NULL);
  if (again != 0) complain(line, 0, 0, "without a failure it ends with", again);
  snprintf(path, sizeof path, "%s/results.json", scratch);
  FILE* const file = fopen(path, "w");
  if (file == NULL) exit(2);
  fputs("{\"schema\": 1, \"results\": [", file);
  for (int m = 1; m <= 8; ++m)
    fprintf(file,
            "%s{\"name\": \"up_proj\", \"scheme\": \"u4zg128\", \"a_dtype\": \"f32\", \"backend\": \"cpu\", \"kernel\": \"k\", "
            "\"m\": %d, \"n\": 64, \"k\": 128, \"median_us\": 2.5}",
            m > 1 ? ", " : "", m);
  fputs("]}", file);
  fclose(file);
}

__attribute__((format(printf, 1, 2))) static void test_command(const char* format, ...) {
  char line[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  char directory[1024], count[1024];
  snprintf(directory, sizeof directory, "%s/command", scratch);
  snprintf(count, sizeof count, "%s/count", scratch);
  clean(directory);
  long total = 0;
  const int plain = command(line, 0, 0, count);
  FILE* const file = fopen(count, "r");
  if (plain != 0 || file == NULL || fscanf(file, "%ld", &total) != 1 || total < 100)
    complain(line, 0, 0, "without a failure it ends with", plain);
  if (file != NULL) fclose(file);
  for (int i = 0; i < 2 * points; ++i) {
    const long n = 1 + total * (i / 2) / points;
    const int for_good = i % 2;
    if (rmdir(directory) != 0 || mkdir(directory, 0700) != 0) clean(directory);
    ++runs;
    const int code = command(line, n, for_good, NULL);
    if (code != 0 && (code != 4 || !said_memory())) complain(line, n, for_good, "it ends with", code);
    if (holds_parts(directory) || holds_parts(scratch)) complain(line, n, for_good, "with", code);
  }
  printf("nibble %s: %ld allocations\n", line, total);
}

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  golden = argv[1], scratch = argv[2], tool = argv[3], shim = argv[4], points = atoi(argv[5]);
  setvbuf(stdout, NULL, _IONBF, 0);
  clean(scratch);
  test_interface();
  prepare();
  test_command("verify %s/awq/g128 -M 2 --json %s/command/out", golden, scratch);
  test_command("convert %s/awq/g128 %s/command/out --format compressed-tensors --json", golden, scratch);
  test_command("convert %s/gptq/v1_4bit_asymmetric %s/command/out --format awq", golden, scratch);
  test_command("dequantize %s/awq/g128 %s/command/out", golden, scratch);
  test_command("quantize %s/model %s/command/out --format int-quantized --json", scratch, scratch);
  test_command("inspect %s/awq/g128 --explain", golden);
  test_command("inspect %s/awq/g128 --json %s/command/out", golden, scratch);
  test_command("quantize %s/model %s/again --format awq --force", scratch, scratch);
  test_command("bench --compare %s/results.json %s/results.json --json %s/command/out", scratch, scratch, scratch);
  test_command("doctor --kernels --json");
  printf("%d of %d runs failed\n", failures, runs);
  return failures != 0;
}
