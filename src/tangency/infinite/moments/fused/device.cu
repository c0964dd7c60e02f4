// What the generated kernels are made of. `real` is float or double; in a float the special-function unit's roots and
// reciprocals are taken (error about 1e-7), not the IEEE ones.

#define FULL 0xffffffffu

__device__ __forceinline__ float up(float v, int d) { return __shfl_up_sync(FULL, v, d); }
__device__ __forceinline__ float down(float v, int d) { return __shfl_down_sync(FULL, v, d); }
__device__ __forceinline__ double up(double v, int d) { return __shfl_up_sync(FULL, v, d); }
__device__ __forceinline__ double down(double v, int d) { return __shfl_down_sync(FULL, v, d); }

__device__ __forceinline__ float root(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float over(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float over_root(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float sat(float x) { return __saturatef(x); }
__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float sign_of(float a, float b) { return copysignf(a, b); }
__device__ __forceinline__ float size_of(float a) { return fabsf(a); }

__device__ __forceinline__ double root(double x) { return sqrt(x); }
__device__ __forceinline__ double over(double x) { return 1.0 / x; }
__device__ __forceinline__ double over_root(double x) { return rsqrt(x); }
__device__ __forceinline__ double sat(double x) { return fmin(fmax(x, 0.0), 1.0); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }
__device__ __forceinline__ double sign_of(double a, double b) { return copysign(a, b); }
__device__ __forceinline__ double size_of(double a) { return fabs(a); }

__device__ __forceinline__ float below(float x, double bound, float yes, float no) { return x < (float)bound ? yes : no; }
__device__ __forceinline__ double below(double x, double bound, double yes, double no) { return x < bound ? yes : no; }

// 1 − cos θ of two patches, exactly 0 where they are parallel but for rounding: there an error ε would be one of √ε in θ.
__device__ __forceinline__ float apart(float x) { return x > 4e-7f ? x : 0.0f; }
__device__ __forceinline__ double apart(double x) { return x > 1e-15 ? x : 0.0; }

__device__ __forceinline__ float2 two_at(const float* at, int k) { return *(const float2*)(at + k); }
__device__ __forceinline__ double2 two_at(const double* at, int k) { return *(const double2*)(at + k); }

// Names for what differs from lane to lane.
typedef int lane_int;
typedef long long lane_long;
typedef bool lane_bool;
typedef double lane_double;
typedef const cell* lane_ptr;

__device__ __forceinline__ int lane_number() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_number() { return threadIdx.x >> 5; }
__device__ __forceinline__ int least(int a, int b) { return min(a, b); }
__device__ __forceinline__ long long far(int a) { return a; }
__device__ __forceinline__ real one_if(bool yes) { return yes ? (real)1 : (real)0; }
__device__ __forceinline__ int take(const int* from, int k) { return from[k]; }
__device__ __forceinline__ real take(const cell* from, long long k) { return from[k]; }
__device__ __forceinline__ const cell* place(const cell* from, int k, int size) { return from + (long long)k * size; }
__device__ __forceinline__ void copy(cell* to, const cell* from, int size, int threads) {
    for (int k = threadIdx.x; k < size; k += threads) to[k] = from[k];
}
template <class T> __device__ __forceinline__ void put(T* to, long long k, T v, bool mine) { if (mine) to[k] = v; }
