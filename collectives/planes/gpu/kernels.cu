// The reductions and copies of the plane `cuda/ipc`. A rank compiles what it needs when it first needs it (kernels.py), for
// one type of elements and one operator at a time:
//     ELEMENT   how an element is stored and computed in, one of the structs below; undefined: bytes are copied
//     OP        SUM, MIN, MAX or PRODUCT
//
// A launch works through jobs. A job reads `ins` arrays of equal length and writes what comes of them to `outs` arrays, each of
// which may be one of those read. One thread does all that belongs to an element, so the order of the inputs alone
// determines the bits of the result, and all outputs get the same.
//
// The table of a launch, in 64-bit words (jobs.py writes it):
//     first[jobs + 1]     chunk at which each job begins; the last is the number of chunks
//     count[jobs]         elements, with the highest bit set if all addresses of the job are multiples of 16
//     address[jobs][ins + outs]
//
// It includes no headers: the package with the compiler has none. Tests compile it for the host, too, with one thread for each block;
// what only a GPU has stands under __CUDACC__.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ALIGNED (1ull << 63)
#define MOST 128  // addresses of a job
#define SUM 1
#define MIN 3
#define MAX 4
#define PRODUCT 5

struct alignas(16) Line {
    u32 word[4];
};

// -- elements: how they are stored, and what they are computed in --------------------------------------------------

struct F32 {
    typedef float Stored;
    typedef float Wide;
    static __device__ float widen(float x) { return x; }
    static __device__ float narrow(float x) { return x; }
    static __device__ float scale(float x, double factor) { return x * (float)factor; }
};

struct F64 {
    typedef double Stored;
    typedef double Wide;
    static __device__ double widen(double x) { return x; }
    static __device__ double narrow(double x) { return x; }
    static __device__ double scale(double x, double factor) { return x * factor; }
};

struct F16 {
    typedef u16 Stored;
    typedef float Wide;
    static __device__ float widen(u16 x) {
#ifdef __CUDACC__
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
#else
        return host_widen(x);
#endif
    }
    static __device__ u16 narrow(float x) {
#ifdef __CUDACC__
        u16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
#else
        return host_narrow(x);
#endif
    }
    static __device__ float scale(float x, double factor) { return x * (float)factor; }
};

struct BF16 {
    typedef u16 Stored;
    typedef float Wide;
    static __device__ float widen(u16 x) { return __uint_as_float((u32)x << 16); }
    // To the nearest, ties to even. A NaN keeps its upper bits, with one set that says that it is one.
    static __device__ u16 narrow(float x) {
        u32 bits = __float_as_uint(x);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
        return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
    static __device__ float scale(float x, double factor) { return x * (float)factor; }
};

// Integers are reduced modulo the width of their type; scaled in float64 and truncated.
template <typename T>
struct Integer {
    typedef T Stored;
    typedef T Wide;
    static __device__ T widen(T x) { return x; }
    static __device__ T narrow(T x) { return x; }
    static __device__ T scale(T x, double factor) { return (T)(long long)((double)x * factor); }
};

// -- one element ----------------------------------------------------------------------------------------------------

// As numpy's: a NaN on either side is the result.
template <typename W>
__device__ W least(W a, W b) {
    return a != a ? a : b != b ? b : b < a ? b : a;
}

template <typename W>
__device__ W most(W a, W b) {
    return a != a ? a : b != b ? b : b > a ? b : a;
}

#ifdef ELEMENT
template <typename W>
__device__ W combine(W a, W b) {
    switch (OP) {
        case MIN: return least(a, b);
        case MAX: return most(a, b);
        case PRODUCT: return (W)(a * b);
        default: return (W)(a + b);
    }
}

// -- a line of 16 bytes, or one element ------------------------------------------------------------------------------

template <typename E, typename Unit, int N>
__device__ void fold_unit(const u64* address, u64 at, u32 ins, u32 outs, double before, double after) {
    typedef typename E::Stored Stored;
    typedef typename E::Wide Wide;
    union {
        Unit unit;
        Stored element[N];
    } line;
    Wide sum[N];
    line.unit = ((const Unit*)address[0])[at];
#pragma unroll
    for (int e = 0; e < N; e++) {
        sum[e] = E::widen(line.element[e]);
        if (before != 1.0) sum[e] = E::scale(sum[e], before);
    }
    for (u32 i = 1; i < ins; i++) {
        line.unit = ((const Unit*)address[i])[at];
#pragma unroll
        for (int e = 0; e < N; e++) {
            Wide next = E::widen(line.element[e]);
            if (before != 1.0) next = E::scale(next, before);
            sum[e] = combine(sum[e], next);
        }
    }
#pragma unroll
    for (int e = 0; e < N; e++) {
        if (after != 1.0) sum[e] = E::scale(sum[e], after);
        line.element[e] = E::narrow(sum[e]);
    }
    for (u32 o = 0; o < outs; o++) ((Unit*)address[ins + o])[at] = line.unit;
}
#else

// What moves unchanged is moved in the largest units that its addresses allow.
template <typename Unit>
__device__ void copy_unit(const u64* address, u64 at, u32 outs) {
    Unit unit = ((const Unit*)address[0])[at];
    for (u32 o = 0; o < outs; o++) ((Unit*)address[1 + o])[at] = unit;
}
#endif

// -- jobs -------------------------------------------------------------------------------------------------------------

struct Chunk {
    u64 begin, end;  // elements
    bool aligned;
};

// The next chunk of a block: its addresses, in shared memory, and which elements.
__device__ Chunk next_chunk(const u64* table, u32 jobs, u32 width, u64 chunk, u64 elements, u64* address) {
    const u64 *first = table, *count = table + jobs + 1, *addresses = count + jobs;
    u32 low = 0, high = jobs;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (first[middle] <= chunk) low = middle; else high = middle;
    }
    __syncthreads();  // all have left the chunk before
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) address[i] = addresses[(u64)low * width + i];
    __syncthreads();
    Chunk found;
    u64 all = count[low] & ~ALIGNED;
    found.aligned = count[low] & ALIGNED;
    found.begin = (chunk - first[low]) * elements;
    found.end = found.begin + elements < all ? found.begin + elements : all;
    return found;
}

// Whether a member gave the operation up, so that nothing must be written any more.
__device__ bool given_up(const volatile u32* stopped, u32 members, u32 stride) {
    __shared__ u32 any;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < members; i += blockDim.x)
        if (stopped[i * stride]) any = 1;
    __syncthreads();
    return any;
}

__device__ u64 now() {
#ifdef __CUDACC__
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
#else
    return host_time();
#endif
}

// `times` are two words in memory of the host: when the first block began, and when one of the last ended.
#ifdef ELEMENT
extern "C" __global__ void __launch_bounds__(256) fold(
    const u64* table, u32 jobs, u32 ins, u32 outs, double before, double after, u64 elements, const u32* stopped,
    u32 members, u32 stride, volatile u64* times) {
    typedef ELEMENT E;
    const int LANES = sizeof(Line) / sizeof(E::Stored);
#else
// Elements are bytes here.
extern "C" __global__ void __launch_bounds__(256) copy(
    const u64* table, u32 jobs, u32 ins, u32 outs, double before, double after, u64 elements, const u32* stopped,
    u32 members, u32 stride, volatile u64* times) {
    const int LANES = sizeof(Line);
#endif
    __shared__ u64 address[MOST];
    if (blockIdx.x == 0 && threadIdx.x == 0) times[0] = now();
    if (given_up(stopped, members, stride)) return;
    u64 chunks = table[jobs];
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        Chunk it = next_chunk(table, jobs, ins + outs, chunk, elements, address);
        u64 at = it.begin;
        if (it.aligned) {
            u64 line = it.begin / LANES, lines = line + (it.end - it.begin) / LANES;
            for (line += threadIdx.x; line < lines; line += blockDim.x)
#ifdef ELEMENT
                fold_unit<E, Line, LANES>(address, line, ins, outs, before, after);
#else
                copy_unit<Line>(address, line, outs);
#endif
            at = lines * LANES;
        }
        for (at += threadIdx.x; at < it.end; at += blockDim.x)
#ifdef ELEMENT
            fold_unit<E, E::Stored, 1>(address, at, ins, outs, before, after);
#else
            copy_unit<u8>(address, at, outs);
#endif
    }
    if (threadIdx.x == 0) times[1] = now();
}
