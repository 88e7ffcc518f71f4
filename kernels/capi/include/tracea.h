/* libtracea: compiled graphs and kernels of tracea_jax in programs without Python.
 *
 *     tracea_context* context;
 *     tracea_graph* graph;
 *     tracea_device cpu = {TRACEA_CPU, 0};
 *     if (tracea_context_create(cpu, 0, &context)) die(tracea_last_error());
 *     if (tracea_graph_load(context, "block.tracea", &graph)) die(tracea_last_error());
 *     tracea_graph_run(graph, &x, 1, &y, 1, workspace, bytes, NULL);
 *
 * Functions that can fail return a status; tracea_last_error has a sentence then, for the
 * calling thread. A context and its graphs may be used by many threads at a time; a graph
 * belongs to its context, and must be destroyed before it. Nothing here throws, prints or
 * ends the process. Memory of arrays, workspaces and streams are the caller's.
 */
#ifndef TRACEA_H_
#define TRACEA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TRACEA_VERSION_MAJOR 0
#define TRACEA_VERSION_MINOR 2
#define TRACEA_VERSION_PATCH 0

/* In C an enumeration takes any number, which is refused in a call; so it does in C++. */
#ifdef __cplusplus
#define TRACEA_ANY_INT : int
#else
#define TRACEA_ANY_INT
#endif

#if defined(__GNUC__)
#define TRACEA_API __attribute__((visibility("default")))
#else
#define TRACEA_API
#endif

typedef enum tracea_status TRACEA_ANY_INT {
  TRACEA_OK = 0,
  TRACEA_INVALID = 1,     /* a wrong argument, or a file that is no whole bundle */
  TRACEA_UNSUPPORTED = 2, /* this device, or this build, has no kernel for it */
  TRACEA_CUDA_ERROR = 3,  /* the CUDA driver failed, or is not there */
  TRACEA_CPU_ERROR = 4    /* out of memory, or a file that cannot be read */
} tracea_status;

typedef enum tracea_dtype TRACEA_ANY_INT {
  TRACEA_FLOAT32 = 0,
  TRACEA_BFLOAT16 = 1,
  TRACEA_FLOAT16 = 2,
  TRACEA_FLOAT64 = 3,
  TRACEA_COMPLEX64 = 4,
  TRACEA_COMPLEX128 = 5,
  TRACEA_BOOL = 6,
  TRACEA_INT32 = 7
} tracea_dtype;

typedef enum tracea_platform TRACEA_ANY_INT {
  TRACEA_CPU = 0,
  TRACEA_CUDA = 1
} tracea_platform;

typedef enum tracea_activation TRACEA_ANY_INT {
  TRACEA_NONE = 0,
  TRACEA_RELU = 1,
  TRACEA_GELU = 2,       /* by tanh, as jax.nn.gelu's default */
  TRACEA_GELU_EXACT = 3, /* by erf */
  TRACEA_SILU = 4
} tracea_activation;

#define TRACEA_MAX_RANK 8

typedef struct tracea_device {
  int32_t platform; /* tracea_platform */
  int32_t ordinal;  /* of a GPU, as CUDA counts them; 0 for the CPU */
} tracea_device;

/* A view of an array of the caller's. Strides are in elements; NULL means row-major and
 * contiguous. */
typedef struct tracea_tensor {
  void* data;
  const int64_t* shape;
  const int64_t* strides;
  int32_t rank;
  int32_t dtype; /* tracea_dtype */
  tracea_device device;
} tracea_tensor;

/* What a graph takes or gives; it lives as long as the graph. */
typedef struct tracea_spec {
  const char* name;
  const int64_t* shape;
  int32_t rank;
  int32_t dtype;
} tracea_spec;

typedef struct tracea_context tracea_context;
typedef struct tracea_graph tracea_graph;
typedef void* tracea_stream; /* CUstream or cudaStream_t; ignored on a CPU */

/* The version of the library that runs, such as "0.2.0". */
TRACEA_API const char* tracea_version(void);

/* What went wrong in the calling thread's last call that failed; "" before any did.
 * The text is UTF-8, at most 2047 bytes long, and belongs to the library: do not free it.
 * The pointer is valid as long as the thread lives. The text it points to stays the same
 * until TRACEA_KEPT_ERRORS further calls of the thread have failed; copy what is kept for
 * longer, or for another thread. */
#define TRACEA_KEPT_ERRORS 8
TRACEA_API const char* tracea_last_error(void);

/* ---- contexts ---------------------------------------------------------------------- */

/* threads: of a CPU context, the calling one included; 0 for one a core. */
TRACEA_API tracea_status tracea_context_create(tracea_device device, int32_t threads,
                                               tracea_context** context);
TRACEA_API void tracea_context_destroy(tracea_context* context);

/* Memory of the context's device, for programs that have no allocator of their own;
 * aligned to 64 bytes or more. */
TRACEA_API tracea_status tracea_allocate(tracea_context* context, size_t bytes,
                                         void** memory);
TRACEA_API tracea_status tracea_free(tracea_context* context, void* memory);

/* Copies between any two of host and device, in the order of the stream; on return, host
 * memory that is not page-locked has been read or written. */
TRACEA_API tracea_status tracea_copy(tracea_context* context, void* to, const void* from,
                                     size_t bytes, tracea_stream stream);

/* Waits for all work on the stream. */
TRACEA_API tracea_status tracea_synchronize(tracea_context* context, tracea_stream stream);

/* ---- graphs ------------------------------------------------------------------------ */

/* Loads what tracea_jax.bundle wrote: checks every file, loads kernels and constants to
 * the context's device. A bundle is a program: load those that you trust. */
TRACEA_API tracea_status tracea_graph_load(tracea_context* context, const char* path,
                                           tracea_graph** graph);
TRACEA_API void tracea_graph_destroy(tracea_graph* graph);

TRACEA_API size_t tracea_graph_num_inputs(const tracea_graph* graph);
TRACEA_API size_t tracea_graph_num_outputs(const tracea_graph* graph);
TRACEA_API tracea_status tracea_graph_input(const tracea_graph* graph, size_t index,
                                            tracea_spec* spec);
TRACEA_API tracea_status tracea_graph_output(const tracea_graph* graph, size_t index,
                                             tracea_spec* spec);

/* Bytes of memory of the device that one run needs for itself. */
TRACEA_API size_t tracea_graph_workspace_bytes(const tracea_graph* graph);

/* Runs the graph: at once on a CPU, in the order of the stream on a GPU, where it neither
 * allocates nor waits and may be captured in a CUDA graph. Runs at the same time need
 * workspaces of their own, aligned to 256 bytes on a GPU and to 64 on a CPU; NULL where
 * none is needed. Outputs must not overlap anything else. */
TRACEA_API tracea_status tracea_graph_run(const tracea_graph* graph,
                                          const tracea_tensor* inputs, size_t num_inputs,
                                          const tracea_tensor* outputs,
                                          size_t num_outputs, void* workspace,
                                          size_t workspace_bytes, tracea_stream stream);

/* ---- single operations ------------------------------------------------------------- */

/* On a CPU with the blocking that suits the shape, at once. On a GPU in the order of the
 * stream, by a kernel of a graph that the context has loaded: kernels for GPUs are compiled
 * for one problem each, so bundle the operation, with these shapes and dtypes, and load it
 * before. Operands are contiguous; matrices of a product may be transposed views. */

/* out = activation(lhs @ rhs + bias) + residual
 *   lhs ([batch,] m, k), rhs ([batch,] k, n), bias (n,) or NULL, residual like out or
 *   NULL, out ([batch,] m, n); float32, bfloat16 or float16. */
TRACEA_API tracea_status tracea_matmul(tracea_context* context, const tracea_tensor* lhs,
                                       const tracea_tensor* rhs, const tracea_tensor* bias,
                                       const tracea_tensor* residual,
                                       tracea_activation activation,
                                       const tracea_tensor* out,
                                       tracea_stream stream);

typedef struct tracea_conv2d_options {
  int32_t stride[2];   /* of rows and columns; 0 counts as 1 */
  int32_t dilation[2]; /* likewise */
  int32_t padding[2];  /* before the first row and column; what follows the last ones is
                          known from the shapes */
  int32_t groups;      /* 0 counts as 1 */
  tracea_activation activation;
} tracea_conv2d_options;

/* out = activation(conv(x, w) + bias + residual)
 *   x (batch, height, width, channels), w (height, width, channels / groups, columns),
 *   bias (columns,) or NULL, residual like out or NULL. */
TRACEA_API tracea_status tracea_conv2d(tracea_context* context, const tracea_tensor* x,
                                       const tracea_tensor* w, const tracea_tensor* bias,
                                       const tracea_tensor* residual,
                                       const tracea_conv2d_options* options,
                                       const tracea_tensor* out,
                                       tracea_stream stream);

typedef struct tracea_attention_options {
  float scale;       /* 0 means 1 / sqrt(head_dim) */
  int32_t is_causal; /* query i sees keys up to i */
} tracea_attention_options;

/* out = softmax(scale * q @ k' + bias, where mask) @ v, for each head
 *   q, out (batch, q_len, heads, head_dim), k, v (batch, kv_len, kv_heads, head_dim),
 *   bias and mask (boolean) of rank 4 that broadcast to (batch, heads, q_len, kv_len), or
 *   NULL. */
TRACEA_API tracea_status tracea_attention(tracea_context* context, const tracea_tensor* q,
                                          const tracea_tensor* k, const tracea_tensor* v,
                                          const tracea_tensor* bias,
                                          const tracea_tensor* mask,
                                          const tracea_attention_options* options,
                                          const tracea_tensor* out,
                                          tracea_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRACEA_H_ */
