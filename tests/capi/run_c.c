/* A program in C that runs a bundle.
 *
 *     run_c cpu|cuda BUNDLE DIRECTORY    8 threads run it on DIRECTORY/in<i>.bin and write
 *                                        DIRECTORY/out<i>.bin
 *     run_c cpu|cuda BUNDLE              loads it, then makes mistakes on purpose
 *     run_c time BUNDLE                  nanoseconds of a run's call, on a GPU
 *
 * Of calls that fail it prints the status and the sentence. It exits with the status of
 * loading, or with 99 where something else is wrong.
 */
#define _POSIX_C_SOURCE 200809L
#include <locale.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tracea.h"

enum { kThreads = 8, kRuns = 3, kMostArrays = 64, kBroken = 99 };

static const size_t kBytes[] = {4, 2, 2, 8, 8, 16, 1, 4}; /* by tracea_dtype */

static tracea_context* context;
static tracea_graph* graph;
static tracea_device device;
static const char* directory;

static void report(const char* what, tracea_status status) {
  printf("%s: %d %s\n", what, (int)status, status == TRACEA_OK ? "" : tracea_last_error());
}

static void need(tracea_status status) {
  if (status == TRACEA_OK) return;
  report("unexpected", status);
  exit(kBroken);
}

static size_t bytes_of(const tracea_spec* spec) {
  size_t bytes = kBytes[spec->dtype];
  for (int i = 0; i < spec->rank; ++i) bytes *= (size_t)spec->shape[i];
  return bytes;
}

static void* host_memory(size_t bytes) {
  void* memory = calloc(bytes + 1, 1);
  if (!memory) exit(kBroken);
  return memory;
}

static void read_file(const char* name, int index, void* to, size_t bytes) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s%d.bin", directory, name, index);
  FILE* file = fopen(path, "rb");
  if (!file || fread(to, 1, bytes, file) != bytes) exit(kBroken);
  fclose(file);
}

static void write_file(const char* name, int index, const void* from, size_t bytes) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s%d.bin", directory, name, index);
  FILE* file = fopen(path, "wb");
  if (!file || fwrite(from, 1, bytes, file) != bytes || fclose(file)) exit(kBroken);
}

static tracea_tensor on_device(const tracea_spec* spec) {
  tracea_tensor tensor = {NULL, spec->shape, NULL, spec->rank, spec->dtype, device};
  need(tracea_allocate(context, bytes_of(spec), &tensor.data));
  return tensor;
}

/* The arrays of one thread. */
typedef struct Arrays {
  tracea_tensor in[kMostArrays], out[kMostArrays];
  void* result[kMostArrays]; /* on the host */
  void* workspace;
} Arrays;

static void make_arrays(Arrays* a) {
  tracea_spec spec;
  for (size_t i = 0; i < tracea_graph_num_inputs(graph); ++i) {
    need(tracea_graph_input(graph, i, &spec));
    a->in[i] = on_device(&spec);
    void* host = host_memory(bytes_of(&spec));
    if (directory) read_file("in", (int)i, host, bytes_of(&spec));
    need(tracea_copy(context, a->in[i].data, host, bytes_of(&spec), NULL));
    need(tracea_synchronize(context, NULL));
    free(host);
  }
  for (size_t i = 0; i < tracea_graph_num_outputs(graph); ++i) {
    need(tracea_graph_output(graph, i, &spec));
    a->out[i] = on_device(&spec);
    a->result[i] = host_memory(bytes_of(&spec));
  }
  need(tracea_allocate(context, tracea_graph_workspace_bytes(graph), &a->workspace));
}

static void free_arrays(Arrays* a) {
  for (size_t i = 0; i < tracea_graph_num_inputs(graph); ++i) {
    need(tracea_free(context, a->in[i].data));
  }
  for (size_t i = 0; i < tracea_graph_num_outputs(graph); ++i) {
    need(tracea_free(context, a->out[i].data));
    free(a->result[i]);
  }
  need(tracea_free(context, a->workspace));
}

static tracea_status run(Arrays* a) {
  return tracea_graph_run(graph, a->in, tracea_graph_num_inputs(graph), a->out,
                          tracea_graph_num_outputs(graph), a->workspace,
                          tracea_graph_workspace_bytes(graph), NULL);
}

static void* work(void* arrays) {
  Arrays* a = arrays;
  tracea_spec spec;
  make_arrays(a);
  for (int i = 0; i < kRuns; ++i) need(run(a));
  for (size_t i = 0; i < tracea_graph_num_outputs(graph); ++i) {
    need(tracea_graph_output(graph, i, &spec));
    need(tracea_copy(context, a->result[i], a->out[i].data, bytes_of(&spec), NULL));
  }
  need(tracea_synchronize(context, NULL));
  return NULL;
}

static void run_in_threads(void) {
  static Arrays all[kThreads];
  pthread_t threads[kThreads];
  tracea_spec spec;
  for (int i = 0; i < kThreads; ++i) {
    if (pthread_create(&threads[i], NULL, work, &all[i])) exit(kBroken);
  }
  for (int i = 0; i < kThreads; ++i) pthread_join(threads[i], NULL);
  for (size_t i = 0; i < tracea_graph_num_outputs(graph); ++i) {
    need(tracea_graph_output(graph, i, &spec));
    for (int t = 1; t < kThreads; ++t) {
      if (memcmp(all[0].result[i], all[t].result[i], bytes_of(&spec))) {
        printf("thread %d computed another output %zu\n", t, i);
        exit(kBroken);
      }
    }
    write_file("out", (int)i, all[0].result[i], bytes_of(&spec));
  }
  for (int i = 0; i < kThreads; ++i) free_arrays(&all[i]);
}

/* ---- mistakes ---- */

static void make_mistakes(void) {
  Arrays a = {0};
  tracea_spec spec;
  make_arrays(&a);
  const tracea_tensor right = a.in[0];
  const size_t in = tracea_graph_num_inputs(graph), out = tracea_graph_num_outputs(graph);
  const size_t bytes = tracea_graph_workspace_bytes(graph);

  report("no graph", tracea_graph_run(NULL, a.in, in, a.out, out, a.workspace, bytes, NULL));
  report("no inputs", tracea_graph_run(graph, NULL, in, a.out, out, a.workspace, bytes, NULL));
  report("few inputs", tracea_graph_run(graph, a.in, 0, a.out, out, a.workspace, bytes, NULL));
  report("no workspace", tracea_graph_run(graph, a.in, in, a.out, out, NULL, 0, NULL));
  report("no spec", tracea_graph_input(graph, 99, &spec));

  a.in[0].data = NULL;
  report("null data", run(&a));
  a.in[0] = right;
  a.in[0].shape = NULL;
  report("null shape", run(&a));
  a.in[0] = right;
  int64_t shape[TRACEA_MAX_RANK];
  memcpy(shape, right.shape, sizeof(int64_t) * (size_t)right.rank);
  shape[0] += 1;
  a.in[0].shape = shape;
  report("wrong shape", run(&a));
  a.in[0] = right;
  a.in[0].rank = 1;
  report("wrong rank", run(&a));
  a.in[0] = right;
  a.in[0].dtype = right.dtype == TRACEA_FLOAT32 ? TRACEA_FLOAT64 : TRACEA_FLOAT32;
  report("wrong dtype", run(&a));
  a.in[0] = right;
  a.in[0].dtype = 77;
  report("no dtype", run(&a));
  a.in[0] = right;
  a.in[0].device.platform = device.platform == TRACEA_CPU ? TRACEA_CUDA : TRACEA_CPU;
  report("wrong device", run(&a));
  a.in[0] = right;
  int64_t strides[TRACEA_MAX_RANK];
  for (int i = 0; i < right.rank; ++i) strides[i] = 3;
  a.in[0].strides = strides;
  report("wrong strides", run(&a));
  a.in[0] = right;
  report("right again", run(&a));
  need(tracea_synchronize(context, NULL));
  free_arrays(&a);

  tracea_context* other = NULL;
  const tracea_device nowhere = {7, 0};
  report("no platform", tracea_context_create(nowhere, 0, &other));
  report("negative threads", tracea_context_create((tracea_device){TRACEA_CPU, 0}, -1, &other));
  report("no path", tracea_graph_load(context, "/nowhere/at/all", &(tracea_graph*){NULL}));
  report("null path", tracea_graph_load(context, NULL, &(tracea_graph*){NULL}));
  report("null context", tracea_graph_load(NULL, "x", &(tracea_graph*){NULL}));
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void time_calls(void) {
  Arrays a = {0};
  make_arrays(&a);
  need(run(&a));
  need(tracea_synchronize(context, NULL));
  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    const double begin = seconds();
    for (int i = 0; i < 50; ++i) need(run(&a));
    const double ns = (seconds() - begin) / 50 * 1e9;
    if (ns < best) best = ns;
    need(tracea_synchronize(context, NULL));
  }
  printf("%.0f ns a run\n", best);
  free_arrays(&a);
}

int main(int argc, char** argv) {
  if (argc < 3) return kBroken;
  setlocale(LC_ALL, ""); /* as programs for people do */
  device.platform = strcmp(argv[1], "cpu") == 0 ? TRACEA_CPU : TRACEA_CUDA;
  directory = argc > 3 ? argv[3] : NULL;
  if (strcmp(tracea_last_error(), "")) return kBroken;
  tracea_status status = tracea_context_create(device, 2, &context);
  if (status == TRACEA_OK) status = tracea_graph_load(context, argv[2], &graph);
  report("load", status);
  if (*localeconv()->decimal_point == ',') printf("in a locale with commas\n");
  if (status == TRACEA_OK) {
    if (strcmp(argv[1], "time") == 0) {
      time_calls();
    } else if (directory) {
      run_in_threads();
    } else {
      make_mistakes();
    }
  }
  tracea_graph_destroy(graph);
  tracea_context_destroy(context);
  return (int)status;
}
