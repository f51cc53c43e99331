package config

import (
	"reflect"
	"strconv"
	"time"
)

// The library's encoder leaves strings bare that its parser then refuses ("? x"), so
// this file writes YAML itself: every free string is quoted.

// appendMapping appends a struct's keys, the first after head and the others after
// indent.
func appendMapping(dst []byte, v reflect.Value, head, indent string) []byte {
	for _, f := range fieldsOf(v.Type()) {
		fv := v.Field(f.index)
		if f.typ.Kind() == reflect.Pointer {
			if fv.IsNil() {
				continue
			}
			fv = fv.Elem()
		} else if f.optional && fv.IsZero() {
			continue
		}
		dst = append(append(append(dst, head...), f.key...), ':')
		head = indent
		switch {
		case fv.Kind() == reflect.Struct:
			dst = appendMapping(append(dst, '\n'), fv, indent+"  ", indent+"  ")
		case fv.Kind() == reflect.Slice && fv.Len() == 0:
			dst = append(dst, " []\n"...)
		case fv.Kind() == reflect.Slice:
			dst = append(dst, '\n')
			for i := range fv.Len() {
				if item := fv.Index(i); item.Kind() == reflect.Struct {
					dst = appendMapping(dst, item, indent+"  - ", indent+"    ")
				} else {
					dst = append(appendScalar(append(dst, indent+"  - "...), item, f), '\n')
				}
			}
		default:
			dst = append(appendScalar(append(dst, ' '), fv, f), '\n')
		}
	}
	return dst
}

func appendScalar(dst []byte, v reflect.Value, f field) []byte {
	switch x := v.Interface().(type) {
	case Bytes:
		return append(dst, x.String()...)
	case time.Duration:
		return append(dst, formatDuration(x)...)
	case string:
		if len(f.oneof) > 0 {
			return append(dst, x...)
		}
		return strconv.AppendQuote(dst, x)
	case bool:
		return strconv.AppendBool(dst, x)
	case float64:
		return strconv.AppendFloat(dst, x, 'f', -1, 64)
	case uint32:
		return strconv.AppendUint(dst, uint64(x), 10)
	}
	return strconv.AppendInt(dst, v.Int(), 10)
}
