/* nibble in C: the stable interface of libnibble.so, in C11.
 *
 *   checkpoint ──read──▶ nib_qtensor ──pack──▶ nib_weight ──plan──▶ nib_plan ──run──▶ D
 *
 * Everything follows seven rules.
 *
 * Status. A function that can fail returns a nib_status. It writes its results last: on failure they are unchanged, and
 * nib_last_error() is the text of the calling thread's last failure, with the values and the remedy. nibble never prints, aborts or
 * throws.
 *
 * Handles. Opaque, made by one function and destroyed by nib_..._destroy, which accepts NULL. Handles are immutable, but for
 * nib_plan_cache: any number of threads may use one at the same time, that one too, but not while a thread destroys it. Handles are
 * independent: a plan outlives the weight it was made for. A handle of the wrong kind is refused; one that was destroyed is undefined
 * behaviour, which debug builds report as invalid_argument.
 *
 * Structs. The first member is struct_size, sizeof the struct as the caller knows it: set it, and zero the rest, for every struct
 * that a function reads or fills. Zero always means the default. Later versions append members: a smaller struct is
 * read as if it ended in zeros, a larger one is refused unless what this library does not know is zero. nib_view and
 * nib_named_view have no size and never change.
 *
 * Strings are UTF-8 and end in NUL. A returned const char* belongs to the handle that was passed, or lives as long as the library; a char*
 * written through a char** is the caller's, for nib_text_free. A char** may be NULL: the text is not made.
 *
 * Schemes are names: "u4zg128" is 4-bit codes with integer zero points, one scale per 128 input channels. Weights are
 * <codes><z|o|f|><t|c|gSIZE|ciSIZE|bNxK>; "z" means (q − z)·s, "o" q·s + z, "f" (q − z)·s with a float z; t, c, g, ci, b: a scale
 * per tensor, per output channel, per group along K, per group of image channels for all elements of a filter, per block. Codes: u2 … u7,
 * u8; u4b8 (code − 8) and the like; s8; e4m3, e5m2, e2m1. Weights that are not quantized are f32, f16 or bf16, without more. Activations are
 * <s8|e4m3><z|o|><t|r|gSIZE>: "s8r" is int8 with a scale per token (row), "t" one known scale.
 *
 * Sizes. M, N, K, a batch, and the extents, strides, paddings and dilations of images are NIB_MAX_SIZE at most; W, D and A
 * (of a convolution also with its padding and as patches) have NIB_MAX_ELEMENTS at most. A convolution's M is B·Oh·Ow. Larger sizes
 * are refused: invalid_argument with the values.
 *
 * The environment. NIBBLE_ISA, NIBBLE_NUM_THREADS and NIBBLE_KERNEL, where set, name a level of CPUs, 1 to 4096 threads, and a row of
 * nib_kernels. With any other value, functions that make a handle, nib_get_cpu and nib_measure_roofline return invalid_argument.
 *
 * W is [N,K]: output × input channels. A is [M,K], D = A·Wᵀ is [M,N]. Of a convolution K is Kh·Kw·C/groups, in that order; A and D are
 * images, [B,C,H,W] in the order of dimensions whatever the order in memory.
 */
#ifndef NIBBLE_NIBBLE_H
#define NIBBLE_NIBBLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Marks the functions that the library exports. */
#if defined(__GNUC__)
#define NIB_API __attribute__((visibility("default")))
#else
#define NIB_API
#endif

/* A program runs with every library of the same major and the same or a later minor version. */
#define NIB_ABI_MAJOR 1
/* Grows with every addition. */
#define NIB_ABI_MINOR 2
/* Both in one number, to compare with nib_abi_version(). */
#define NIB_ABI_VERSION (NIB_ABI_MAJOR * 65536 + NIB_ABI_MINOR)

/* The limit of a single size: 2^30. */
#define NIB_MAX_SIZE (INT64_C(1) << 30)
/* The limit of a matrix or batch of images, in elements: 2^46. */
#define NIB_MAX_ELEMENTS (INT64_C(1) << 46)

/* ---- Values ---------------------------------------------------------------------------------------------------------------- */

/* What a program can act on. */
typedef int32_t nib_status;
enum {
  NIB_OK = 0,               /* success */
  NIB_INVALID_ARGUMENT = 1, /* the caller's values contradict each other or the documented range */
  NIB_UNSUPPORTED = 2,      /* well-formed, but nibble has no implementation for it, or the machine no GPU */
  NIB_NOT_FOUND = 3,        /* a file, tensor, module or kernel of that name does not exist */
  NIB_ALREADY_EXISTS = 4,   /* an output that would be overwritten */
  NIB_IO_ERROR = 5,         /* the operating system refused: permissions, full disk, no memory */
  NIB_CORRUPT_DATA = 6,     /* a file breaks the rules of its format */
  NIB_INTERNAL = 7          /* a bug in nibble; please report it */
};

/* What one element is. uX are X-bit unsigned codes, uXbB the same meaning code − B. */
typedef int32_t nib_dtype;
enum {
  NIB_NONE = 0,
  NIB_F64 = 1,
  NIB_F32 = 2,
  NIB_F16 = 3,
  NIB_BF16 = 4,
  NIB_E4M3 = 5,
  NIB_E5M2 = 6,
  NIB_E4M3FNUZ = 7,
  NIB_E5M2FNUZ = 8,
  NIB_E8M0 = 9,
  NIB_E3M2 = 10,
  NIB_E2M3 = 11,
  NIB_E2M1 = 12,
  NIB_BOOLEAN = 13,
  NIB_S8 = 14,
  NIB_S16 = 15,
  NIB_S32 = 16,
  NIB_S64 = 17,
  NIB_U8 = 18,
  NIB_U16 = 19,
  NIB_U32 = 20,
  NIB_U64 = 21,
  NIB_U2 = 22,
  NIB_U3 = 23,
  NIB_U4 = 24,
  NIB_U5 = 25,
  NIB_U6 = 26,
  NIB_U7 = 27,
  NIB_U2B2 = 28,
  NIB_U3B4 = 29,
  NIB_U4B8 = 30,
  NIB_U5B16 = 31,
  NIB_U6B32 = 32,
  NIB_U7B64 = 33,
  NIB_U8B128 = 34,
  NIB_C64 = 35
};

/* Where memory is and kernels run. */
typedef int32_t nib_backend;
enum {
  NIB_CPU = 0,
  NIB_CUDA = 1 /* the GPU that is current in the calling thread */
};

/* Activation functions. NaN stays NaN in each of them, clamp and relu too. */
typedef int32_t nib_activation;
enum {
  NIB_ACTIVATION_NONE = 0,
  NIB_ACTIVATION_RELU = 1,      /* max(x, 0) */
  NIB_ACTIVATION_CLAMP = 2,     /* min(max(x, clamp_low), clamp_high); relu6 is clamp with 0 and 6 */
  NIB_ACTIVATION_GELU_ERF = 3,  /* x·Φ(x) */
  NIB_ACTIVATION_GELU_TANH = 4, /* its approximation by tanh */
  NIB_ACTIVATION_SILU = 5,      /* x·sigmoid(x) */
  NIB_ACTIVATION_SIGMOID = 6,   /* 1 / (1 + exp(−x)) */
  NIB_ACTIVATION_TANH = 7,
  NIB_ACTIVATION_HARDSWISH = 8,  /* x·min(max(x + 3, 0), 6)/6 */
  NIB_ACTIVATION_LEAKY_RELU = 9, /* x, or x·negative_slope where x < 0 */
  NIB_ACTIVATION_QUICK_GELU = 10 /* x·sigmoid(1.702·x) */
};

/* Where the elements of an image [B,C,H,W] lie. */
typedef int32_t nib_image_layout;
enum {
  /* Pixels of a channel side by side: strides of W 1, of H W; channels (but of 1×1 images) and images at any distance. */
  NIB_NCHW = 0,
  /* Channels of a pixel side by side: stride of C 1; pixels evenly spaced through all images, C apart or more. */
  NIB_NHWC = 1
};

/* How products of FP8 codes are summed on GPUs of compute capability 9.0. Every other sum is exact or f32. */
typedef int32_t nib_accumulation;
enum {
  NIB_FAST = 0,   /* all of K in tensor cores, which keep 13 bits below the largest addend: the error grows with K */
  NIB_PRECISE = 1 /* 512 channels in tensor cores, these partial sums in f32 */
};

/* A borrowed array of up to four dimensions. Strides are in elements and not negative; the last one is 1 where a function says
 * so. `data` is aligned to the element type. Functions do not write through the views that they read. */
typedef struct nib_view {
  void* data;         /* of element [0, ..., 0]; NULL: absent */
  nib_dtype dtype;    /* of an element */
  int32_t rank;       /* dimensions in use, 1 to 4 */
  int64_t shape[4];   /* outermost first */
  int64_t strides[4]; /* in elements */
} nib_view;

/* A dense view of [length], to read or write. */
static inline nib_view nib_vector(const void* data, nib_dtype dtype, int64_t length) {
  nib_view view = {(void*)(uintptr_t)data, dtype, 1, {length, 0, 0, 0}, {1, 0, 0, 0}};
  return view;
}
/* A dense view of [rows,columns]. */
static inline nib_view nib_matrix(const void* data, nib_dtype dtype, int64_t rows, int64_t columns) {
  nib_view view = {(void*)(uintptr_t)data, dtype, 2, {rows, columns, 0, 0}, {columns, 1, 0, 0}};
  return view;
}
/* A dense view of images [batch,channels,height,width] that lie as `layout` says. */
static inline nib_view nib_images(const void* data, nib_dtype dtype, nib_image_layout layout, int64_t batch, int64_t channels,
                                  int64_t height, int64_t width) {
  nib_view view = {
      (void*)(uintptr_t)data, dtype, 4, {batch, channels, height, width}, {channels * height * width, height * width, width, 1}};
  if (layout == NIB_NHWC) view.strides[1] = 1, view.strides[2] = width * channels, view.strides[3] = channels;
  return view;
}

typedef struct nib_context nib_context;         /* the threads to run on */
typedef struct nib_checkpoint nib_checkpoint;   /* a checkpoint; its files stay open and memory-mapped until it is destroyed */
typedef struct nib_qtensor nib_qtensor;         /* a quantized matrix in canonical form: codes, scales, zero points, ... */
typedef struct nib_weight nib_weight;           /* the same, packed in the byte order that its kernels read */
typedef struct nib_packed_file nib_packed_file; /* packed weights in a file, which stays open and memory-mapped. Since 1.2 */
typedef struct nib_plan nib_plan; /* the kernels to run, for one shape and scheme, every M up to a limit, and one GPU */
typedef struct nib_plan_cache nib_plan_cache;     /* plans by what they are for, shared by layers. Since 1.2 */
typedef struct nib_experts nib_experts;           /* packed weights of the experts of a layer. Since 1.2 */
typedef struct nib_grouped_plan nib_grouped_plan; /* a product of rows that are sorted by expert. Since 1.2 */
typedef struct nib_moe_plan nib_moe_plan;         /* a layer of experts. Since 1.2 */
typedef struct nib_gpu_memory nib_gpu_memory;     /* bytes on the GPU */

/* ---- The library ----------------------------------------------------------------------------------------------------------- */

/* NIB_ABI_VERSION of the library that is running. */
NIB_API uint32_t nib_abi_version(void);
/* The version of the project: "0.2.0". */
NIB_API const char* nib_version_string(void);
/* The text of this thread's last failure; "" when no call has failed. Valid until the thread's next failure. */
NIB_API const char* nib_last_error(void);
/* The name of a status, "invalid_argument"; "unknown" for a number that is no status. */
NIB_API const char* nib_status_name(nib_status status);
/* The name of a type, "bf16"; NULL for a number that is no type. */
NIB_API const char* nib_dtype_name(nib_dtype dtype);
/* The type of that name: NIB_BF16 for "bf16"; NIB_NONE when there is none. */
NIB_API nib_dtype nib_dtype_parse(const char* name);
/* Frees a text that a function gave to the caller; NULL does nothing. */
NIB_API void nib_text_free(char* text);

/* The tables of this build: one line a row, fields separated by tabs.
 * Kernels in tie-breaking order, the reference last: name, backend, op, layout, isa, "batch_invariant" or "", summary. */
NIB_API nib_status nib_kernels(char** text);
/* Layouts: name, backend, then a drawing of the bytes, indented, on lines of its own. */
NIB_API nib_status nib_layouts(char** text);
/* Checkpoint formats, in the order they are tried: name, "read" or "read+write", summary. */
NIB_API nib_status nib_formats(char** text);

/* ---- Threads --------------------------------------------------------------------------------------------------------------- */

/* One iteration, which may overlap with others in any order. Does not throw. */
typedef void (*nib_loop_body)(void* body, int64_t i);
/* A loop on the engine's threads: runs call(body, i) for every i in [0, count) and returns when all have finished. */
typedef void (*nib_parallel_for)(void* user, int64_t count, nib_loop_body call, void* body);

/* The threads of a context. */
typedef struct nib_context_desc {
  size_t struct_size;
  nib_parallel_for parallel_for; /* runs loops on the engine's threads; NULL: a pool of nibble's own */
  void* user;                    /* passed to parallel_for */
  int32_t threads;               /* how many take part, the caller's included, 4096 at most; 0: one per core (parallel_for: 1) */
  int32_t reserved;
} nib_context_desc;

/* Makes a context. Functions that take a context accept NULL: the process-wide pool, with one thread for each of nib_cpu.cores, or
 * NIBBLE_NUM_THREADS. A pool has as many threads as the system gives, and a child process after fork() starts its own. A pool runs one
 * loop at a time; others wait. parallel_for is called from the threads that call nibble. */
NIB_API nib_status nib_context_create(const nib_context_desc* desc, nib_context** context);
NIB_API nib_status nib_context_destroy(nib_context* context);

/* ---- The machine ----------------------------------------------------------------------------------------------------------- */

/* The CPU. */
typedef struct nib_cpu {
  size_t struct_size;
  char name[64];                         /* "AMD EPYC 9654" */
  char isa[24];                          /* the best level of this machine, "avx512vnni", or the one in NIBBLE_ISA */
  int64_t l1d_bytes, l2_bytes, l3_bytes; /* L1 and L2 per core; 0: unknown, or none */
  int64_t memory_bytes;                  /* in all, free or not */
  int32_t cores;                         /* that this process may use: its affinity mask, or the quota of its control groups */
  int32_t reserved;
} nib_cpu;
/* Describes the CPU that this process runs on. */
NIB_API nib_status nib_get_cpu(nib_cpu* cpu);

/* A GPU. */
typedef struct nib_gpu {
  size_t struct_size;
  char name[64];                  /* "NVIDIA H200" */
  char isa[24];                   /* the best level of kernels that runs on it: "sm90" */
  int64_t l2_bytes, memory_bytes; /* in all, free or not */
  double read_gbytes_per_s;       /* estimated from the memory's clock and width, not measured */
  int32_t ordinal;                /* as cudaGetDevice counts */
  int32_t compute_capability;     /* 90 means 9.0 */
  int32_t multiprocessors;        /* SMs */
  int32_t reserved;
} nib_gpu;
/* Describes the GPU that is current in the calling thread. Errors: unsupported with the reason when there is none. */
NIB_API nib_status nib_get_gpu(nib_gpu* gpu);

/* The measured peak rates of the CPU. */
typedef struct nib_roofline {
  size_t struct_size;
  double read_gbytes_per_s;                  /* streaming reads of a buffer beyond the caches */
  double f32_gflops, bf16_gflops, int8_gops; /* 0: the CPU has no instruction for it */
  int32_t threads;                           /* that took part */
  int32_t reserved;
} nib_roofline;
/* Measures them; takes half a second and 256 MB. */
NIB_API nib_status nib_measure_roofline(const nib_context* context, nib_roofline* roofline);

/* Allocates memory of the current GPU, aligned to 256 bytes. Errors: io_error when there is not enough, unsupported without a GPU. */
NIB_API nib_status nib_gpu_memory_create(size_t bytes, nib_gpu_memory** memory);
/* Its first byte, a device pointer. */
NIB_API nib_status nib_gpu_memory_data(const nib_gpu_memory* memory, void** data);
NIB_API nib_status nib_gpu_memory_destroy(nib_gpu_memory* memory);
/* Copies from the host in the order of the stream (a cudaStream_t; NULL: the default stream) and waits. */
NIB_API nib_status nib_copy_to_gpu(void* to, const void* from, size_t bytes, void* stream);
/* Copies to the host, as nib_copy_to_gpu does from there. */
NIB_API nib_status nib_copy_from_gpu(void* to, const void* from, size_t bytes, void* stream);
/* Waits for everything on the stream and returns its errors. */
NIB_API nib_status nib_synchronize(void* stream);

/* ---- Quantized matrices ---------------------------------------------------------------------------------------------------- */

/* How codes lie in bytes. */
typedef int32_t nib_nibble_order;
enum {
  NIB_BYTES = 0,      /* one to a byte */
  NIB_LOW_FIRST = 1,  /* two, the first one in the low half: compressed-tensors, torchao, GPTQ along K */
  NIB_HIGH_FIRST = 2, /* two, the first one in the high half: MNN, bitsandbytes, int4 matrices of PyTorch */
  /* [K, N·bits/8] of TensorRT-LLM's preprocess_weights_for_mixed_gemm, for schemes of u4b8 or u8b128. What it does depends on the GPU: */
  NIB_TRTLLM_INTERLEAVED = 3,     /* compute capability 7.5 to 8.9 and 12.0, and experts on every GPU */
  NIB_TRTLLM_INTERLEAVED_FP8 = 4, /* the same for FP8 activations (W4A8) */
  NIB_TRTLLM_TRANSPOSED = 5,      /* 9.0 by the C++ tools, 10.0 and 10.3 */
  NIB_TRTLLM_PERMUTED = 6         /* 9.0 by the Python tools of 2026 */
};

/* A quantized matrix, to create or as it is. G is the number of groups along K.
 * W[n,k] = (q − z)·s·scale2, or q·s + z, as the scheme says, with q from codes[n,k], and s and z of row n and group g =
 * g_idx[k], or k / group modulo G without g_idx. Only of "ci" is G less than K / group: it is the images' channels / group. */
typedef struct nib_qtensor_desc {
  size_t struct_size;
  const char* scheme; /* of weights: "u4zg128" */
  int64_t n, k;       /* output and input channels */
  nib_view codes;     /* [N,K], one code a byte, upper bits zero: u8; s8 or e4m3 for such codes; dense ("bf16"): of that type */
  nib_view scales;    /* [rows,G] f32, f16, bf16, e4m3 or e8m0; rows: N, ⌈N / block⌉, 1; absent: dense */
  nib_view zeros;     /* shaped like scales; u8 or s8 for "z", f32, f16 or bf16 for "o" and "f" */
  nib_view g_idx;     /* s32 [K], the group of each input channel (act-order); absent: k / group */
  nib_view prescale;  /* [K] f32, f16 or bf16: multiplies A (AWQ, SmoothQuant); of a filter for each element the same [Ci] */
  nib_view bias;      /* [N] f32, f16 or bf16 */
  /* One number each; NULL: none. */
  const float* scale2;     /* multiplies W */
  const float* act_scale;  /* of all activations, for plans with the act_scheme "s8t" or "e4m3t" */
  const float* act_limit;  /* the largest magnitude that a scale covers; larger activations saturate */
  const int32_t* act_zero; /* the zero point that goes with act_scale: of s8 −128 ... 127, of e4m3 0 */
  /* Kh × Kw of a convolution, whose rows are in the order kh, kw, channel; 0: 1, as of linear layers. */
  int64_t filter_height, filter_width;
  /* Since 1.2. Of nib_qtensor_create; nib_qtensor_get gives codes of a byte and all scales. */
  nib_nibble_order nibble_order; /* of 4-bit codes, two to a byte: u8 [N,⌈K/2⌉], or TensorRT-LLM's; NIB_BYTES: a byte each */
  int32_t reserved;
} nib_qtensor_desc;

/* Makes a matrix from copies of everything. Views may have any strides; absent ones are zero. Sizes, types and indices are checked.
 * Errors: invalid_argument with the member and the values. */
NIB_API nib_status nib_qtensor_create(const nib_qtensor_desc* desc, nib_qtensor** q);
/* Describes a matrix; views and strings belong to it. codes are u8 whatever their type, but floats of dense weights. */
NIB_API nib_status nib_qtensor_get(const nib_qtensor* q, nib_qtensor_desc* desc);
NIB_API nib_status nib_qtensor_destroy(nib_qtensor* q);
/* Layers that read the same activations (q, k and v of attention, gate and up of a glu) as one: the weights one below the other. Scales per
 * tensor become scales per output channel, which say the same; parts without a bias have zeros in the joined one, if another has a bias.
 * Since 1.2. Errors: invalid_argument where they differ in K, scheme, types or in what they do to activations, with the field and the
 * values; where a part ends inside a block of rows that share a scale; for convolutions. */
NIB_API nib_status nib_join(const nib_qtensor* const* parts, size_t count, nib_qtensor** q);

/* A tensor of a module that is already in memory, by its name inside the module: "qweight". */
typedef struct nib_named_view {
  const char* name; /* without the module's */
  nib_view view;    /* dense, in host memory */
} nib_named_view;

/* Decodes the tensors of one layer as AWQ, GPTQ, compressed-tensors, ... store them. `config` is the JSON of quantization_config, which
 * some formats need to be recognised; NULL: none. `notes`: findings, one a line. Runs on the threads of the process-wide pool.
 * Errors: not_found when no format knows the tensors; corrupt_data, invalid_argument. Tensors that are not quantized are a dense weight. */
NIB_API nib_status nib_read_module(const nib_named_view* tensors, size_t count, const char* config, nib_qtensor** q,
                                   char** notes);

/* How to quantize. */
typedef struct nib_quantize_desc {
  size_t struct_size;
  const char* scheme;  /* NULL: "u4b8g128"; uXbB, or uX with zero points, X of 2 ... 8; s8; e4m3; f32, f16 or bf16: rounded */
  nib_dtype scale;     /* f32, f16 (the default) or bf16: scales are rounded to it before codes are chosen */
  int32_t clip_search; /* not 0: per group, shrink the range while that lowers the squared error */
} nib_quantize_desc;

/* Rounds w[N,K] (f32, f16, bf16; last stride 1) to nearest; desc may be NULL. The same bits for any number of threads.
 * Errors: invalid_argument for a group that does not divide K, a NaN or infinity, or a number beyond a dense type, with its position. */
NIB_API nib_status nib_quantize(const nib_context* context, const nib_view* w, const nib_quantize_desc* desc, nib_qtensor** q);

/* The same for the filter of a convolution, w[Co,C/groups,Kh,Kw] (any strides). Rows of q are Kh·Kw·C/groups long, in that order: groups
 * whose size divides C/groups lie inside one element of the filter, others span several elements. */
NIB_API nib_status nib_quantize_conv(const nib_context* context, const nib_view* w, const nib_quantize_desc* desc,
                                     nib_qtensor** q);

/* How far a quantized matrix is from the original. */
typedef struct nib_quant_error {
  size_t struct_size;
  double sqnr_db;     /* 10·log10( Σw² / Σ(w−ŵ)² ); infinite when equal */
  double cosine;      /* ⟨w,ŵ⟩ / (‖w‖·‖ŵ‖) */
  double max_abs;     /* max |w−ŵ| */
  double relative_l2; /* ‖w−ŵ‖ / ‖w‖ */
} nib_quant_error;
/* The error of q against w[N,K] (f32, f16, bf16; last stride 1). With a prescale p, w is compared with Ŵ·diag(p). */
NIB_API nib_status nib_quantization_error(const nib_context* context, const nib_view* w, const nib_qtensor* q,
                                          nib_quant_error* error);

/* ---- Checkpoints ----------------------------------------------------------------------------------------------------------- */

/* What is in a checkpoint. */
typedef struct nib_checkpoint_info {
  size_t struct_size;
  size_t modules;     /* linear layers and convolutions, quantized or dense */
  size_t tensors;     /* all of them, of modules or not */
  const char* config; /* the text of config.json, or "" */
} nib_checkpoint_info;

/* A layer of a checkpoint. */
typedef struct nib_module {
  size_t struct_size;
  const char* name;   /* "model.layers.0.mlp.down_proj" */
  const char* format; /* "awq", "gptq", ..., "dense" */
  char scheme[48];    /* as detected: "u4zg128"; of dense modules the type: "bf16" */
  char claimed[48];   /* as config.json says: "s8r_s8c"; "" when it says nothing */
  int64_t n, k;       /* output and input channels; of a convolution K is Kh·Kw·C/groups */
  uint64_t bytes;     /* of its tensors */
  int32_t quantized;  /* not 0: its weight is; a dense one is read as it is */
  int32_t act_order;  /* not 0: has a g_idx */
  int32_t has_bias;   /* not 0: nib_checkpoint_read returns it with the weight */
  int32_t reserved;
} nib_module;

/* A tensor of a checkpoint, as stored. */
typedef struct nib_stored_tensor {
  size_t struct_size;
  const char* name;     /* "model.layers.0.mlp.down_proj.qweight" */
  const char* file;     /* relative to the checkpoint */
  uint64_t file_offset; /* of its first byte in the file */
  uint64_t bytes;       /* in the file */
  /* Of the mapped file: read only, any alignment, rank 1 for more than four dimensions. As with every mapped file, touching a page that
   * another program has truncated raises SIGBUS; nibble's own functions read the file instead and return io_error. */
  nib_view view;
} nib_stored_tensor;

/* Opens a directory with *.safetensors and config.json, or one .safetensors file. Every header is checked.
 * Errors: not_found, io_error, corrupt_data with file, tensor and byte offset. */
NIB_API nib_status nib_checkpoint_open(const char* path, nib_checkpoint** checkpoint);
NIB_API nib_status nib_checkpoint_destroy(nib_checkpoint* checkpoint);
/* Describes a checkpoint; the text belongs to it. */
NIB_API nib_status nib_checkpoint_get(const nib_checkpoint* checkpoint, nib_checkpoint_info* info);
/* A module by its index, in file order. Errors: invalid_argument when there are not so many. */
NIB_API nib_status nib_checkpoint_module(const nib_checkpoint* checkpoint, size_t index, nib_module* module);
/* A tensor by its index, in file order. Errors: invalid_argument when there are not so many. */
NIB_API nib_status nib_checkpoint_tensor(const nib_checkpoint* checkpoint, size_t index, nib_stored_tensor* tensor);
/* The index of the module of that name. Errors: not_found. */
NIB_API nib_status nib_checkpoint_find_module(const nib_checkpoint* checkpoint, const char* name, size_t* index);
/* The index of the tensor of that name. Errors: not_found. */
NIB_API nib_status nib_checkpoint_find_tensor(const nib_checkpoint* checkpoint, const char* name, size_t* index);
/* Findings about the checkpoint and its modules, one a line: "warning: model.layers.0.q_proj: ...". */
NIB_API nib_status nib_checkpoint_notes(const nib_checkpoint* checkpoint, char** text);
/* Decodes a module, on the threads of the process-wide pool. `notes`: findings that need the data, one a line. */
NIB_API nib_status nib_checkpoint_read(const nib_checkpoint* checkpoint, size_t module, nib_qtensor** q, char** notes);
/* Of which channels a part of a layer is. */
typedef int32_t nib_channels;
enum {
  NIB_OUTPUTS = 0, /* rows of W[N,K] */
  NIB_INPUTS = 1   /* columns */
};
/* The same for channels [begin, end) alone, 0 <= begin < end <= N or K, as a layer of its own, without reading the bytes of other
 * channels' weights. A part of the input channels has the whole bias. Errors: invalid_argument for channels that the module has not;
 * unsupported where a stored word, group or block has channels on both sides of a boundary, for input channels in act-order, and for
 * convolutions: read those whole. */
NIB_API nib_status nib_checkpoint_read_part(const nib_checkpoint* checkpoint, size_t module, nib_channels of, int64_t begin,
                                            int64_t end, nib_qtensor** q, char** notes);

/* Called from the calling thread during long work; done and total have the same unit, `what` is the current item. */
typedef void (*nib_progress)(void* user, uint64_t done, uint64_t total, const char* what);

/* How a checkpoint is rewritten. */
typedef struct nib_transform_desc {
  size_t struct_size;
  const nib_context* context; /* NULL: the process-wide pool */
  nib_progress progress;      /* NULL: no reports */
  void* user;                 /* passed to progress */
  const char* format;         /* quantize, convert: of the output; NULL: "compressed-tensors" */
  /* Of nib_checkpoint_quantize: */
  const nib_quantize_desc* quantize; /* NULL: its defaults */
  const char* act_scheme;  /* how layers quantize activations: "s8r"; "s8t": scales come from the calibration; NULL: not */
  const char* calibration; /* safetensors file with NAME.input_absmax [K] or NAME.input [tokens,K]; NULL: none */
  const double* smooth;    /* SmoothQuant's α in [0,1], needs the calibration; NULL: none */
  const char* skip;        /* modules to leave as they are, a regular expression searched in names; NULL: none */
  nib_dtype dtype;         /* nib_checkpoint_dequantize: f32, f16 (the default) or bf16 */
  int32_t overwrite;       /* not 0: an existing output is replaced */
  int32_t convs;           /* nib_checkpoint_quantize: not 0: convolutions too, of weights [Co,C/groups,Kh,Kw] */
  int32_t all;             /* nib_checkpoint_quantize: not 0: embeddings, output heads and routers of experts too */
  const char* only;        /* nib_checkpoint_quantize: the only modules, like skip; NULL: every one */
  int32_t dry_run;         /* nib_checkpoint_quantize: not 0: the report says what would be done; nothing is written */
  int32_t reserved;
  uint64_t max_shard_bytes; /* of tensors in a file of a directory, but for a larger layer; 0: as in the input */
} nib_transform_desc;

/* Quantizes every linear layer of float weights that is not skipped; scales whose type is not given have that of 16-bit weights. Writes
 * a new checkpoint, whole or not at all, and leaves `in` as it is; desc may be NULL. `report`: a line for every module that changed,
 * "name<tab>scheme", then notes on modules that were left as they are, and why. Errors: already_exists; unsupported with the module;
 * io_error; and those of nib_checkpoint_open. */
NIB_API nib_status nib_checkpoint_quantize(const char* in, const char* out, const nib_transform_desc* desc, char** report);
/* Re-encodes every quantized module in desc->format, without loss or not at all. Otherwise as nib_checkpoint_quantize. */
NIB_API nib_status nib_checkpoint_convert(const char* in, const char* out, const nib_transform_desc* desc, char** report);
/* Replaces every quantized module by its float weight of desc->dtype. Otherwise as nib_checkpoint_quantize. */
NIB_API nib_status nib_checkpoint_dequantize(const char* in, const char* out, const nib_transform_desc* desc, char** report);

/* ---- Packed weights -------------------------------------------------------------------------------------------------------- */

/* The plans that a weight is packed for, which it remembers, and where it is packed. */
typedef struct nib_pack_desc {
  size_t struct_size;
  const nib_context* context;           /* NULL: the process-wide pool */
  const struct nib_linear_desc* linear; /* of the plans; NULL: f32 activations and up to 8192 tokens */
  const struct nib_conv_desc* conv;     /* for a convolution, in place of `linear` */
  const char* layout;                   /* by name; NULL: that of the cheapest kernels over all M of the plans */
  const char* kernel;                   /* pack for this kernel, by name; overrides layout and backend */
  nib_backend backend;                  /* NIB_CUDA: packed on the current GPU, into its memory */
  int32_t reserved;
} nib_pack_desc;

/* A packed weight. */
typedef struct nib_weight_info {
  size_t struct_size;
  const char* layout;                  /* "cpu_n32" */
  const void* data;                    /* the packed bytes, in host or device memory */
  size_t bytes;                        /* how many they are */
  char scheme[48];                     /* "u4zg128" */
  int64_t n, k;                        /* output and input channels */
  nib_backend backend;                 /* NIB_CPU: host memory; NIB_CUDA: the GPU that was current when it was packed */
  int32_t has_bias;                    /* not 0: NIB_BIAS adds it when the operand is absent */
  int32_t act_order;                   /* not 0: input channels are permuted; plans permute A to match */
  int32_t paired;                      /* not 0: packed for a glu, which all its plans have. Since 1.2; 0 before */
  int64_t filter_height, filter_width; /* of a convolution; 1 of linear layers */
} nib_weight_info;

/* Rearranges q for the kernels that the plans of desc will choose; desc may be NULL. A layout of the GPU can be packed on any machine,
 * by name and with NIB_CPU; nib_upload copies the result to a GPU later. Errors: those of the plans' descriptors; not_found for an
 * unknown layout or kernel; unsupported when the layout cannot hold the matrix, or without a GPU; io_error without memory. */
NIB_API nib_status nib_pack(const nib_qtensor* q, const nib_pack_desc* desc, nib_weight** weight);
/* The exact inverse: unpack(pack(q)) == q. Copies from device memory first. */
NIB_API nib_status nib_unpack(const nib_weight* weight, nib_qtensor** q);
/* A copy in the current GPU's memory of a weight that was packed in the host's for a layout of the GPU. */
NIB_API nib_status nib_upload(const nib_weight* host, nib_weight** device);
/* The inverse: a copy in host memory of a weight in device memory. Since 1.2. */
NIB_API nib_status nib_download(const nib_weight* device, nib_weight** host);
/* Describes a weight; pointers belong to it. */
NIB_API nib_status nib_weight_get(const nib_weight* weight, nib_weight_info* info);
NIB_API nib_status nib_weight_destroy(nib_weight* weight);

/* ---- Files of packed weights, since 1.2 ------------------------------------------------------------------------------------ */

/* What is in a file of packed weights. */
typedef struct nib_packed_file_info {
  size_t struct_size;
  size_t count;                /* weights */
  const char* library_version; /* of the library that wrote it: "0.2.0" */
  const char* checkpoint;      /* the name, without folders, of the checkpoint it was packed from; "" when that is not recorded */
} nib_packed_file_info;

/* A weight in such a file. */
typedef struct nib_packed_module {
  size_t struct_size;
  const char* name;                    /* that it was saved under */
  const char* layout;                  /* "cpu_n32" */
  char scheme[48];                     /* "u4zg128" */
  int64_t n, k;                        /* output and input channels */
  uint64_t bytes;                      /* of the packed weight */
  int64_t filter_height, filter_width; /* of a convolution; 1 of linear layers */
  int32_t has_bias;                    /* not 0: it has a bias of its own */
  int32_t act_order;                   /* not 0: input channels are permuted */
} nib_packed_module;

/* Writes `count` weights under their names into a file, whole or not at all; weights in device memory are copied to the host. With
 * `checkpoint`, which may be NULL, the file records digests of its modules of the same names, by which a changed checkpoint is noticed.
 * `overwrite`, not 0: an existing file is replaced. Errors: already_exists; invalid_argument for a name of more than 1000 bytes, with
 * control characters, or that is given twice; io_error. */
NIB_API nib_status nib_packed_file_save(const char* path, const char* const* names, const nib_weight* const* weights,
                                        size_t count, const nib_checkpoint* checkpoint, int32_t overwrite);
/* Opens such a file and checks everything but the packed bytes, which are not read. Errors: not_found; io_error; corrupt_data for what is
 * no such file, is truncated or contradicts itself; unsupported for another version of the format or of a layout: pack again. */
NIB_API nib_status nib_packed_file_open(const char* path, nib_packed_file** file);
/* Opens the one beside a checkpoint: MODEL.nibble for MODEL or MODEL.safetensors. `notes`: the modules that have changed since, a line
 * each. Errors: not_found when there is none, and those of nib_packed_file_open. */
NIB_API nib_status nib_packed_file_beside(const nib_checkpoint* checkpoint, nib_packed_file** file, char** notes);
NIB_API nib_status nib_packed_file_destroy(nib_packed_file* file);
/* Describes a file; the text belongs to it. */
NIB_API nib_status nib_packed_file_get(const nib_packed_file* file, nib_packed_file_info* info);
/* A weight by its index, in the order they were saved. Errors: invalid_argument when there are not so many. */
NIB_API nib_status nib_packed_file_module(const nib_packed_file* file, size_t index, nib_packed_module* module);
/* The index of the weight of that name. Errors: not_found. */
NIB_API nib_status nib_packed_file_find_module(const nib_packed_file* file, const char* name, size_t* index);
/* Makes a weight in host memory whose bytes are the mapped file: nothing is copied, and the file stays mapped until the weight is
 * destroyed. As with every mapped file, touching a page that another program has truncated raises SIGBUS. nib_upload copies a weight for
 * the GPU there. Errors: io_error when the file has been truncated; corrupt_data. */
NIB_API nib_status nib_packed_file_load(const nib_packed_file* file, size_t index, nib_weight** weight);
/* nib_pack of nib_checkpoint_read, or the same weight from the file where that has it, in the layout that nib_pack would choose, of a
 * module that has not changed since; of NIB_CUDA uploaded. `file` and `desc` may be NULL. `packed_because`: "" of a weight from the file,
 * else why it was packed now. Errors: those of nib_packed_file_load, nib_upload, nib_checkpoint_read and nib_pack. */
NIB_API nib_status nib_packed_weight(const nib_checkpoint* checkpoint, size_t module, const nib_packed_file* file,
                                     const nib_pack_desc* desc, nib_weight** weight, char** packed_because);

/* ---- Plans ----------------------------------------------------------------------------------------------------------------- */

/* The parts of the epilogue that have operands, and these. Bias, gate and residual are f32, f16 or bf16. */
enum {
  NIB_ROW_SCALE = 1, /* f32 [M] */
  NIB_COL_SCALE = 2, /* f32 [N] */
  NIB_BIAS = 4,      /* [N]; the weight's own when the operand is absent */
  NIB_GATE = 8,      /* shaped like D, multiplied in after the activation */
  NIB_RESIDUAL = 16, /* shaped like D, added last */
  NIB_SUM_BIAS = 32, /* s32 [N], of W8A8: added to the integer sums, before their scales. Since 1.2 */
  NIB_OUT_SCALE = 64 /* out_scale, f32 [1] or [N], and out_zero, s32 [1], are operands of a run. Since 1.2 */
};

/* x = row_scale · col_scale · A·Wᵀ + bias; D = quantize( activation(x) ∘ gate + residual ), in this order.
 * A glu joins the two halves of x [M,N], as in the joined gate_up layers of decoders; D, gate and residual are [M,N/2] then:
 * D = quantize( activation(min(x₁, glu_limit)) ∘ (clamp(x₂, ±glu_limit) + glu_offset) ∘ gate + residual ).
 * Of W8A8, where A·Wᵀ is s_a · s_w · I with the integer sums I = Σ (q_a − z_a)·(q_w − z_w), NIB_SUM_BIAS is added to I, modulo 2³², and a D
 * of s32 is I. W8A8 is an A of int8 with a scale per token or tensor, and a W of integers with one per output channel. */
typedef struct nib_epilogue {
  size_t struct_size;
  uint32_t operands;           /* the parts that are present: NIB_BIAS | NIB_RESIDUAL */
  nib_activation activation;   /* of each element */
  float clamp_low, clamp_high; /* of NIB_ACTIVATION_CLAMP, low ≤ high; both 0: relu6, 0 and 6 */
  nib_dtype out; /* of D: f32 (the default), f16, bf16, s8; since 1.2 u8, and of an A that comes as codes s32: I and sum_bias */
  /* s8, u8: D = clamp(round_to_even(x / out_scale) + out_zero, the type's range and [out_low, out_high]); 0, clamped, where x is NaN. */
  float out_scale;           /* positive, finite; 0: 1 */
  int32_t out_zero;          /* a value of the type */
  float negative_slope;      /* of NIB_ACTIVATION_LEAKY_RELU, finite; 0: 0.01. A library before 1.1 refuses what is not 0 */
  int32_t out_low, out_high; /* of s8 and u8, low ≤ high; both 0: the range of the type. Since 1.2 */
  int32_t glu; /* not 0: of linear layers with an even N. A weight that is packed with it has it in all its plans. Since 1.2 */
  float glu_limit;  /* positive: the magnitude at which both halves saturate (gpt-oss: 7); 0: none */
  float glu_offset; /* finite: added to the second half (gpt-oss: 1) */
  int32_t reserved;
} nib_epilogue;

/* Normalization of a float A before the product: y = x / sqrt(mean(x²) + eps) · (norm_weight + weight_offset) of RMSNorm, and of LayerNorm
 * y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · (norm_weight + weight_offset) + norm_bias, where means are over the K channels of
 * a token, and x is A or, with NIB_NORM_ADD, A + norm_add, rounded to the type of A and stored as norm_sum. Arithmetic is f32, and y is
 * rounded once to the type of A. Since 1.2. */
typedef int32_t nib_norm_kind;
enum { NIB_NORM_NONE = 0, NIB_NORM_RMS = 1, NIB_NORM_LAYER = 2 };
enum {
  NIB_NORM_ADD = 1, /* norm_add is added to A first */
  NIB_NORM_BIAS = 2 /* of LayerNorm: norm_bias is added */
};
typedef struct nib_norm {
  size_t struct_size;
  nib_norm_kind kind;
  uint32_t parts;      /* NIB_NORM_ADD | NIB_NORM_BIAS */
  float eps;           /* not negative, finite */
  float weight_offset; /* finite; 1 in Gemma, whose checkpoints store the weight less 1 */
} nib_norm;

/* D = epilogue(A·Wᵀ). */
typedef struct nib_linear_desc {
  size_t struct_size;
  const nib_epilogue* epilogue; /* NULL: D is f32 [M,N] */
  /* NULL: A is multiplied as it is, to f32 accuracy. "s8r", "e4m3g128", ...: nib_plan_run quantizes A and multiplies the codes; "s8t",
   * "e4m3t": with the weight's act_scale. */
  const char* act_scheme;
  int64_t m_max; /* the plan serves every M in [1, m_max]; 0: 1 */
  /* Type of A: f32 (the default), f16, bf16; s8 or e4m3: A comes quantized, as `act_scheme` says; u8: the same with integer zero points
   * ("s8zr"), of codes and zero points in 0 ... 255. */
  nib_dtype a_dtype;
  nib_accumulation accumulation; /* of FP8 codes */
  const nib_norm* norm;          /* of a float A; NULL: none. Since 1.2 */
} nib_linear_desc;

/* D[B,Co,Oh,Ow] = epilogue(conv2d(A[B,C,H,W], W)). The filter Kh × Kw and Co are the weight's, C is K / (Kh·Kw) · groups;
 * Oh = ⌊(H + padding − dilation·(Kh − 1) − 1) / stride⌋ + 1, and Ow likewise. Padding is zeros. */
typedef struct nib_conv_desc {
  size_t struct_size;
  const nib_epilogue* epilogue; /* without NIB_ROW_SCALE; NULL: D is f32 */
  /* As nib_linear_desc.act_scheme: "s8r" is a scale per patch; a gSIZE divides C/groups, so that a group lies inside one pixel. */
  const char* act_scheme;
  int64_t batch_max;                                                /* the plan serves every B in [1, batch_max]; 0: 1 */
  int64_t height, width;                                            /* of an input image */
  int64_t stride_height, stride_width;                              /* 0: 1 */
  int64_t padding_top, padding_bottom, padding_left, padding_right; /* pixels */
  int64_t dilation_height, dilation_width;                          /* 0: 1 */
  int64_t groups;                                                   /* 0: 1; divides C and Co; C: depthwise */
  nib_image_layout input, output;                                   /* of A; of D, gate and residual */
  nib_dtype a_dtype; /* type of A: f32 (the default), f16, bf16; s8: A comes quantized, by "s8t" or "s8zt"; u8: by "s8zt" */
  nib_accumulation accumulation; /* of FP8 codes */
} nib_conv_desc;

/* D = W, each element rounded once to `out`. */
typedef struct nib_dequantize_desc {
  size_t struct_size;
  nib_dtype out;      /* f32 (the default), f16 or bf16 */
  int32_t transposed; /* not 0: D is [K,N], else [N,K] */
} nib_dequantize_desc;

/* Limits on the choice of kernels, and the machine that costs are predicted for. */
typedef struct nib_plan_options {
  size_t struct_size;
  const char* kernel;          /* force this main kernel; NULL: NIBBLE_KERNEL from the environment, else the cheapest */
  const nib_roofline* machine; /* the measured CPU, for predicted times; NULL: a typical one; overrides threads */
  int32_t threads;             /* assumed by the cost model, 4096 at most; 0: as many as the process-wide pool has */
  int32_t forbid_reference;    /* not 0: fail rather than fall back to the reference */
} nib_plan_options;

/* Makes a plan for a linear layer. desc NULL: for what nib_pack packed the weight for; options may be NULL. Errors: invalid_argument for
 * a descriptor that contradicts itself, or without one when the weight was packed for a convolution; not_found, with the nearest name,
 * for a forced kernel that does not exist; unsupported, with the reasons, when no kernel takes the layer or the forced one does not. */
NIB_API nib_status nib_plan_linear(const nib_weight* weight, const nib_linear_desc* desc, const nib_plan_options* options,
                                   nib_plan** plan);
/* Makes a plan for a convolution. desc NULL: for what nib_pack packed the weight for. Errors: invalid_argument for an impossible
 * geometry, with the values and the size of the output that they give, or without a desc when the weight was packed for a linear layer;
 * otherwise as nib_plan_linear. */
NIB_API nib_status nib_plan_conv(const nib_weight* weight, const nib_conv_desc* desc, const nib_plan_options* options,
                                 nib_plan** plan);
/* Makes a plan whose run writes W. Errors: unsupported with the reasons. */
NIB_API nib_status nib_plan_dequantize(const nib_weight* weight, const nib_dequantize_desc* desc, const nib_plan_options* options,
                                       nib_plan** plan);
/* Bytes of scratch memory that nib_plan_run needs, for the largest M: host or device memory, as the weight's, of any alignment. */
NIB_API nib_status nib_plan_workspace_size(const nib_plan* plan, size_t* bytes);
/* The same for m tokens, or of a convolution a batch of m images; of an m that the plan does not serve, for the nearest that it does.
 * Since 1.2. */
NIB_API nib_status nib_plan_workspace_size_for(const nib_plan* plan, int64_t m, size_t* bytes);
/* The main kernel for this M; of a convolution, for a batch of m images. */
NIB_API nib_status nib_plan_kernel(const nib_plan* plan, int64_t m, const char** name);
/* Per range of M: the kernels that run, their predicted time, and why every other kernel does not run. */
NIB_API nib_status nib_plan_explain(const nib_plan* plan, char** text);
/* The same of the plan that a weight packed so would get; nothing is packed. desc: NULL as for nib_pack. gpu: "h100" or "h200", a GPU that
 * need not be there, in place of desc's backend; or NULL. Errors: those of nib_pack and of the plan; not_found for another gpu. */
NIB_API nib_status nib_explain(const nib_qtensor* q, const nib_pack_desc* desc, const char* gpu, char** text);
NIB_API nib_status nib_plan_destroy(nib_plan* plan);

/* What became of the calls of a nib_plan_cache. Since 1.2. */
typedef struct nib_plan_cache_info {
  size_t struct_size;
  uint64_t hits;   /* calls that got a plan that another call had made */
  uint64_t misses; /* calls that made a plan, or failed to */
  size_t size;     /* plans that are kept */
} nib_plan_cache_info;

/* Makes a cache of up to `capacity` plans (0: 256), for any number of threads and layers, which drops the least recently used one first.
 * A plan is found by everything that it depends on: the shape, scheme and layout of the weight, the GPU that has it, the descriptor, the
 * options, and NIBBLE_KERNEL. Threads that ask for the same plan wait while one of them makes it. Errors are not kept. Since 1.2. */
NIB_API nib_status nib_plan_cache_create(size_t capacity, nib_plan_cache** cache);
/* As nib_plan_linear; the plan serves at least every M in [1, m_max]: the next power of two is planned for, where a layer may be so large,
 * and a plan for a larger M serves smaller ones. The handle is the caller's to destroy; the cache keeps the plan. Since 1.2. */
NIB_API nib_status nib_plan_cache_linear(nib_plan_cache* cache, const nib_weight* weight, const nib_linear_desc* desc,
                                         const nib_plan_options* options, nib_plan** plan);
/* As nib_plan_conv; the plan serves at least every batch in [1, batch_max], likewise. Since 1.2. */
NIB_API nib_status nib_plan_cache_conv(nib_plan_cache* cache, const nib_weight* weight, const nib_conv_desc* desc,
                                       const nib_plan_options* options, nib_plan** plan);
/* What became of the calls so far. Since 1.2. */
NIB_API nib_status nib_plan_cache_get(const nib_plan_cache* cache, nib_plan_cache_info* info);
/* Drops every plan; handles that callers have stay valid. Since 1.2. */
NIB_API nib_status nib_plan_cache_clear(nib_plan_cache* cache);
NIB_API nib_status nib_plan_cache_destroy(nib_plan_cache* cache);

/* What a run reads and writes; absent operands are NULL, those that the plan does not use are ignored. 2-D operands have a last stride
 * of 1, images the strides of their layout. An A that comes quantized is A[m,k] = (code − a_zero[m,g])·a_scale[m,g], g = k / group;
 * without a_scale, per tensor, the weight's act_scale and act_zero hold, of s8 codes: of u8 codes the zero point is 128 more.
 * a_zero: in device memory −128 ... 127, not checked. In host memory any s32; of a convolution with padding −128 ... 127, because padding
 * is filled with the code a_zero. Of u8 codes 0 ... 255 in place of −128 ... 127. With float offsets ("s8or", "s8og32") a_zero is f32,
 * and A[m,k] = code·a_scale[m,g] + a_zero[m,g]. */
typedef struct nib_operands {
  size_t struct_size;
  const nib_context* context; /* of a run on the CPU */
  const nib_view* a;          /* [M,K], [B,C,H,W]; NULL for dequantize */
  const nib_view* d;          /* [M,N], [B,Co,Oh,Ow]; written */
  /* For an A that comes quantized: f32 [1] per tensor, [M] or, for all tokens, [1] per token, [M,G] per group, any strides. A D of s32
   * does not need it. */
  const nib_view* a_scale;
  const nib_view* a_zero;    /* s32 of the shapes of a_scale, where the scheme has zero points; one of the two may be [1] */
  const nib_view* row_scale; /* f32 [M], with NIB_ROW_SCALE */
  const nib_view* col_scale; /* f32 [N], with NIB_COL_SCALE */
  const nib_view* bias;      /* f32, f16 or bf16 [N], with NIB_BIAS; NULL: the weight's own */
  const nib_view* gate;      /* f32, f16 or bf16, shaped like D, with NIB_GATE */
  const nib_view* residual;  /* f32, f16 or bf16, shaped like D, with NIB_RESIDUAL */
  const nib_view* sum_bias;  /* s32 [N], with NIB_SUM_BIAS */
  const nib_view* out_scale; /* f32 [1] or [N], with NIB_OUT_SCALE: positive, finite, not checked */
  const nib_view* out_zero;  /* s32 [1], with NIB_OUT_SCALE: a value of D's type, not checked; NULL: 0 */
  /* A hint, since 1.2: the weight of the call that follows on the same stream. Kernels of sm_90 for up to 16 tokens ask for it in L2 (up
   * to 8 MB, evenly spaced) once they have asked for their own; D does not change. In device memory, of the same GPU, where it has to
   * live as long as this call's. Other kernels ignore it. */
  const nib_weight* next;
  /* With nib_linear_desc.norm, since 1.2. */
  const nib_view* norm_weight; /* f32, f16 or bf16 [K] */
  const nib_view* norm_bias;   /* the same, with NIB_NORM_BIAS */
  const nib_view* norm_add;    /* f32, f16 or bf16 [M,K], with NIB_NORM_ADD */
  const nib_view* norm_sum;    /* written: of A's type [M,K], with NIB_NORM_ADD; may be the memory of either; NULL: not stored */
} nib_operands;

/* Runs a plan with a weight of the shape, scheme, layout and backend it was made for. On the CPU `stream` is NULL, and D is
 * written on return. On the GPU all pointers are device memory, and the work is enqueued on `stream`, a cudaStream_t; it can be captured
 * in a CUDA graph, except for the first run on a device, which loads the kernel's code. No allocation, search or synchronisation; the
 * only lock is that of the process-wide pool. The dense tier (linear_*_dense) searches in its first run of a shape.
 * Errors: invalid_argument with what does not fit; nothing has been written then. */
NIB_API nib_status nib_plan_run(const nib_plan* plan, const nib_weight* weight, const nib_operands* operands, void* workspace,
                                size_t workspace_bytes, void* stream);

/* ---- Mixture of experts, since 1.2 ----------------------------------------------------------------------------------------- */

/* E layers of the same sizes, of which every token goes through a few. Where the experts are, all views are: in host memory D is written on
 * return; on the GPU the work is enqueued on `stream`, a cudaStream_t, as that of nib_plan_run, and a captured graph serves every routing that
 * its views hold when it is replayed. There ids, offsets, counts and rows are not checked: ids outside 0 ... E − 1 are none. */

/* Packs `count` experts, E, for a specification as nib_pack does one weight: desc->linear is that of an expert, whose m_max is the most
 * tokens of a call. desc may be NULL. Errors: invalid_argument without experts, or where they differ in sizes, scheme or types, with the
 * expert and the values; unsupported for convolutions; otherwise as nib_pack. */
NIB_API nib_status nib_pack_experts(const nib_qtensor* const* q, size_t count, const nib_pack_desc* desc, nib_experts** experts);
/* Makes experts of weights that have been packed one by one, as of files. They keep their memory; weights on the GPU that are not equally far
 * apart are copied. Errors: invalid_argument without weights, or where they differ in sizes, scheme, types, memory, layout or
 * specification; for convolutions. */
NIB_API nib_status nib_experts_of(const nib_weight* const* weights, size_t count, nib_experts** experts);
/* Makes a handle of expert `index`: a weight like any other, which shares the bytes. Errors: invalid_argument when there are not so
 * many. */
NIB_API nib_status nib_experts_weight(const nib_experts* experts, size_t index, nib_weight** weight);

/* What experts have in common. */
typedef struct nib_experts_info {
  size_t struct_size;
  size_t count;        /* how many: E */
  size_t bytes;        /* packed, of all */
  int64_t n, k;        /* output and input channels of each */
  nib_backend backend; /* where they are: NIB_CUDA: the GPU that was current when they were packed */
  int32_t reserved;
} nib_experts_info;
NIB_API nib_status nib_experts_get(const nib_experts* experts, nib_experts_info* info);
NIB_API nib_status nib_experts_destroy(nib_experts* experts);

/* The layers of experts of a checkpoint, in whatever form they are stored: a line for each in file order, its name, a tab, and how many experts
 * it has. What lacks a matrix or a number is none. */
NIB_API nib_status nib_checkpoint_expert_layers(const nib_checkpoint* checkpoint, char** text);
/* How a layer of experts is packed. */
typedef struct nib_expert_layer_desc {
  size_t struct_size;
  const nib_context* context;     /* NULL: the process-wide pool */
  const nib_linear_desc* gate_up; /* of an expert, with a glu and the model's activation; not NULL */
  const nib_linear_desc* down;    /* of an expert; NULL: f32 activations and up to 8192 tokens */
  const char* layout;             /* as in nib_pack_desc; NULL: that of the cheapest kernels */
  const char* kernel;             /* as in nib_pack_desc; NULL: any */
  nib_backend backend;            /* NIB_CUDA: packed on the current GPU, into its memory */
  int32_t reserved;
} nib_expert_layer_desc;
/* Packs the experts of the layer of that name, one after the other, so that no more than one is in memory unpacked: gate and up as one
 * weight, all rows of the gate first, and down. notes: findings of reading, as nib_checkpoint_notes has them; NULL: none wanted.
 * Errors: not_found for a layer that there is not, with those that there are, or for what it lacks; invalid_argument where its experts
 * differ, with the values; otherwise as nib_checkpoint_read, nib_join and nib_pack. */
NIB_API nib_status nib_pack_expert_layer(const nib_checkpoint* checkpoint, const char* layer, const nib_expert_layer_desc* desc,
                                         nib_experts** gate_up, nib_experts** down, char** notes);

/* Makes a plan of D = epilogue(A · W_eᵀ), where each row has its expert e. desc: of an expert, with the most rows of all experts together
 * as m_max; NULL: for what the experts were packed for. Of the operands of its epilogue, those with a row for each of A's are taken
 * (row_scale, gate, residual, and a_scale and a_zero of a quantized A), and biases are the experts' own. Errors: as nib_plan_linear;
 * unsupported for other operands. */
NIB_API nib_status nib_plan_grouped(const nib_experts* experts, const nib_linear_desc* desc, const nib_plan_options* options,
                                    nib_grouped_plan** plan);
/* Bytes of scratch memory that nib_grouped_plan_run needs, of any alignment. */
NIB_API nib_status nib_grouped_plan_workspace_size(const nib_grouped_plan* plan, size_t* bytes);
/* The same for a run with nib_expert_rows.ids, which gathers rows there and puts results in order. */
NIB_API nib_status nib_grouped_plan_ids_workspace_size(const nib_grouped_plan* plan, size_t* bytes);
/* nib_plan_explain of the plan of an expert's rows. */
NIB_API nib_status nib_grouped_plan_explain(const nib_grouped_plan* plan, char** text);
NIB_API nib_status nib_grouped_plan_destroy(nib_grouped_plan* plan);

/* Which rows of A go through which expert: offsets, with rows or without, counts alone, or ids alone; the others are NULL. */
typedef struct nib_expert_rows {
  size_t struct_size;
  /* s32 [E+1], rising from 0 to R: rows offsets[e] ... offsets[e+1] − 1 of A [R,K] and D [R,N] are expert e's. */
  const nib_view* offsets;
  /* s32 [E]: A is [E,R,K] and D [E,R,N], of which the first counts[e] rows of expert e are read and written. */
  const nib_view* counts;
  /* s32 [R], with offsets and a float A: row i of the sorted order is row rows[i] of A, which may have any number of rows, and row i of D. */
  const nib_view* rows;
  /* s32 [T,top_k], any strides: pair (t,j) is row t·top_k + j of D [T·top_k,N], and expert ids[t,j]'s; of −1, no expert, that row becomes
   * zeros. A, of floats, is [T,K], or has a row for each pair. On the GPU D is f32, f16 or bf16, with a multiple of 8 columns and nothing
   * between its rows. */
  const nib_view* ids;
} nib_expert_rows;

/* Runs it; on the CPU `stream` is NULL. With counts operands have E·R rows, those of A, with ids T·top_k. Errors: invalid_argument with
 * the values that do not fit; nothing has been written then. */
NIB_API nib_status nib_grouped_plan_run(const nib_grouped_plan* plan, const nib_experts* experts, const nib_expert_rows* rows,
                                        const nib_operands* operands, void* workspace, size_t workspace_bytes, void* stream);

/* A layer of experts. */
typedef struct nib_moe_desc {
  size_t struct_size;
  int64_t tokens_max;             /* the plan serves every number of tokens T in [1, tokens_max]; 0: 1 */
  int64_t top_k;                  /* experts of a token, 1 ... E; 0: 1 */
  const nib_linear_desc* gate_up; /* of an expert, without m_max; NULL: what they were packed for */
  /* The same; A is of the type that gate_up writes. On the GPU the results are of the type of its epilogue, and are rounded to one of 16 bits
   * before they are added; on the CPU they are f32. */
  const nib_linear_desc* down;
  nib_dtype out;    /* of D: f32 (the default), f16 or bf16 */
  int32_t residual; /* not 0: nib_moe_operands.residual is added last */
} nib_moe_desc;

/* Makes a plan of D[t] = Σ_j weights[t,j] · down_e(glu(gate_up_e(x[t]))) + residual[t], with e = ids[t,j]: added in f32 in the order of j.
 * desc may be NULL. Errors: invalid_argument where the two do not fit each other, with the values; unsupported for operands; otherwise as
 * nib_plan_linear. */
NIB_API nib_status nib_plan_moe(const nib_experts* gate_up, const nib_experts* down, const nib_moe_desc* desc,
                                const nib_plan_options* options, nib_moe_plan** plan);
/* Bytes of scratch memory that nib_moe_plan_run needs, of any alignment. */
NIB_API nib_status nib_moe_plan_workspace_size(const nib_moe_plan* plan, size_t* bytes);
/* nib_plan_explain of the two plans of an expert's rows, after lines with their names, "gate_up" and "down". */
NIB_API nib_status nib_moe_plan_explain(const nib_moe_plan* plan, char** text);
NIB_API nib_status nib_moe_plan_destroy(nib_moe_plan* plan);

/* What a run of a layer of experts reads and writes. */
typedef struct nib_moe_operands {
  size_t struct_size;
  const nib_context* context; /* NULL: the process-wide pool */
  const nib_view* x;          /* [T,K] of the a_dtype of gate_up, last stride 1 */
  const nib_view* d;          /* [T,N], last stride 1; written */
  const nib_view* ids;        /* s32 [T,top_k], any strides: the experts of a token, each at most once; −1: none */
  const nib_view* weights;    /* f32 [T,top_k], any strides: what their results are multiplied by */
  const nib_view* residual;   /* f32, f16 or bf16 [T,N], with nib_moe_desc.residual */
} nib_moe_operands;

/* Runs it; on the CPU `stream` is NULL. Errors: invalid_argument with the values that do not fit, ids included; nothing has been
 * written then. */
NIB_API nib_status nib_moe_plan_run(const nib_moe_plan* plan, const nib_experts* gate_up, const nib_experts* down,
                                    const nib_moe_operands* operands, void* workspace, size_t workspace_bytes, void* stream);

/* How the logits of a router become scores. */
typedef int32_t nib_route_score;
enum {
  NIB_ROUTE_SOFTMAX = 0, /* over all experts */
  NIB_ROUTE_SIGMOID = 1  /* of each */
};

/* The rule of a router, what it reads and writes. */
typedef struct nib_route_desc {
  size_t struct_size;
  const nib_context* context; /* NULL: the process-wide pool */
  int64_t top_k;              /* experts of a token, 1 ... those of the groups that are kept; 0: 1 */
  int64_t groups, top_groups; /* 0: 1. Experts form equal groups; kept are those whose two best choices have the largest sums */
  nib_route_score score;      /* softmax or sigmoid */
  int32_t unnormalized;       /* not 0: weights are the scores; else the scores divided by their sum */
  float scale;                /* multiplies all weights, last; 0: 1 */
  nib_backend backend;        /* NIB_CUDA: all views are device memory; up to 1024 experts */
  const nib_view* logits;     /* f32, f16 or bf16 [T,E], last stride 1; NaN counts as −∞ */
  const nib_view* bias;       /* f32 [E], dense; NULL: none */
  const nib_view* ids;        /* written: s32 [T,top_k], any strides */
  const nib_view* weights;    /* written: f32 [T,top_k], any strides */
  void* stream;               /* of NIB_CUDA, which the work is enqueued on; NULL: the default stream */
} nib_route_desc;

/* Chooses the top_k experts of each token, the best first, of equals the lower number. A choice is made by score + bias, and weights are
 * scores without it. Errors: invalid_argument with the values that do not fit, unsupported without a GPU; nothing has been written then. */
NIB_API nib_status nib_route(const nib_route_desc* routing);

/* ---- Other operators ------------------------------------------------------------------------------------------------------- */

/* Activations a[M,K] → 8-bit codes: x ≈ (code − zero)·scale, with float offsets ("s8or", "s8og32") code·scale + zero. */
typedef struct nib_act_quantize_desc {
  size_t struct_size;
  const nib_context* context; /* of a run on the CPU */
  const char* scheme;         /* "s8r", "s8zr", "s8og32", "e4m3r", "e4m3g128", "s8t", "e4m3t" */
  const nib_view* a;          /* f32, f16 or bf16, last stride 1 */
  const nib_view* prescale;   /* f32 [K], dense: a is multiplied by it first; NULL: not */
  const float* limit;         /* the largest magnitude that a scale covers; larger ones saturate; NULL: none */
  const float* static_scale;  /* of "t": the known scale */
  const int32_t* static_zero; /* of "s8t": the known zero point; NULL: 0 */
  const nib_view* codes;      /* written: s8 or e4m3 [M,K], last stride 1 */
  const nib_view* scales;     /* written: f32 [M], or [M,G], any strides; NULL for "t" */
  const nib_view* zeros;      /* written, shaped like scales: s32 of schemes with "z", f32 of those with "o" */
  const nib_view* sums;       /* written: s32 [M], the sum of a token's s8 codes; NULL: not written */
  nib_backend backend;        /* NIB_CUDA: all views, prescale too, are device memory */
  int32_t reserved;
} nib_act_quantize_desc;

/* Quantizes activations, bit for bit as a plan with that act_scheme does: for engines that quantize once for several layers. On the GPU
 * the work is enqueued on `stream`; on the CPU `stream` is NULL. A token or group with a NaN or an infinity gets the scale NaN and codes
 * 0; with a known scale, infinities saturate and a NaN becomes 0 (s8) or NaN (e4m3). Errors: invalid_argument with the values,
 * unsupported; nothing has been written then. */
NIB_API nib_status nib_quantize_activations(const nib_act_quantize_desc* activations, void* stream);

/* How qweight and qzeros are packed. */
enum {
  NIB_AWQ = 0, /* qweight s32 [K,N/8], qzeros s32 [G,N/8], nibbles in AWQ's order */
  NIB_GPTQ = 1 /* qweight s32 [⌈K·bits/32⌉,N], qzeros s32 [G,⌈N·bits/32⌉], dense streams */
};

/* A matrix as it lies in an AWQ or GPTQ checkpoint, dense, in device memory. */
typedef struct nib_checkpoint_tensors {
  size_t struct_size;
  const void* qweight;     /* as `packing` says */
  const void* qzeros;      /* as `packing` says */
  const void* scales;      /* [G,N] */
  const void* g_idx;       /* s32 [K], each in [0,G), not checked; NULL: k / group */
  int64_t n, k;            /* output and input channels */
  int64_t group;           /* input channels of a group; 0: all of K */
  int32_t packing;         /* NIB_AWQ, NIB_GPTQ */
  int32_t bits;            /* per code and zero point: NIB_AWQ 4, NIB_GPTQ 2, 3, 4 or 8; 0: 4 */
  nib_dtype scale;         /* f16 (the default), bf16 or f32 */
  int32_t zeros_minus_one; /* not 0: GPTQ v1, qzeros hold (z − 1) mod 2^bits */
} nib_checkpoint_tensors;

/* Enqueues W → out, dense f16, bf16 or f32 [N,K], or [K,N] when `transposed` is not 0; no packing, no allocation. For the GPU, of compute
 * capability 7.5 or later; on the CPU nib_read_module and nib_plan_dequantize give the same bits. Errors: invalid_argument with the
 * values, unsupported without such a GPU. */
NIB_API nib_status nib_dequantize_checkpoint_tensors(const nib_checkpoint_tensors* tensors, const nib_view* out,
                                                     int32_t transposed, void* stream);

/* ---- Verification ---------------------------------------------------------------------------------------------------------- */

/* The layer to verify, and how. */
typedef struct nib_verify_desc {
  size_t struct_size;
  const nib_context* context;    /* NULL: the process-wide pool */
  const nib_linear_desc* linear; /* m_max rows are run; NULL: one row of f32 */
  const nib_pack_desc* pack;     /* where to run; NULL: on the CPU */
  const nib_plan_options* plan;  /* the kernel to verify; NULL: the cheapest */
  uint64_t seed;                 /* of activations and operands; 0: 1 */
  int64_t sample_columns;        /* check so many output channels, evenly spread; 0: all */
  float outliers;                /* every 256th input channel is this many times larger; 0: 1 */
  int32_t reserved;
  const nib_conv_desc* conv; /* q is a convolution's, and batch_max images are run; NULL: q is a linear layer's */
} nib_verify_desc;

/* The result of verifying a layer. */
typedef struct nib_verify_report {
  size_t struct_size;
  int32_t passed;     /* every output within its bound, round_trip and repeatable */
  int32_t round_trip; /* unpack(pack(q)) == q */
  int32_t repeatable; /* a second run gave the same bits */
  int32_t reserved;
  int64_t checked;               /* outputs compared */
  double worst_error_over_bound; /* at most 1 when passed */
  double relative_l2;            /* ‖D − oracle‖ / ‖oracle‖ */
  char kernel[96];               /* the kernel that ran */
} nib_verify_report;

/* Packs q, runs it on random activations and compares D with a scalar double-precision oracle, within derived bounds; desc may be NULL.
 * NIB_OK means that D was compared: report->passed is the result, `failure` says where D is wrong and by how much, "" when it passed. */
NIB_API nib_status nib_verify(const nib_qtensor* q, const nib_verify_desc* desc, nib_verify_report* report, char** failure);

#ifdef __cplusplus
}
#endif
#endif
