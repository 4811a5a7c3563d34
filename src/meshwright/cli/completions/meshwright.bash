# Completion of meshwright in bash, by `meshwright completion bash`.

@TABLES@

_meshwright() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} verb=${COMP_WORDS[1]} start=2 rows
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        _meshwright_offer "$(_meshwright_verbs)"
        return
    fi
    rows=$(_meshwright_verbs "$verb")
    if [[ -n $rows ]]; then
        if ((COMP_CWORD == 2)); then
            _meshwright_offer "$rows"
            return
        fi
        verb="$verb ${COMP_WORDS[2]}" start=3
    fi
    # The line is split at '=', so a flag may be two words before its value.
    if [[ $cur == = ]]; then
        cur=
    elif [[ $prev == = ]]; then
        prev=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    if [[ $prev == --help || $prev == -h ]]; then
        _meshwright_offer "$(_meshwright_names "$verb")"
        return
    fi
    if ((COMP_CWORD > start)) && [[ $prev == --* ]]; then
        rows=$(_meshwright_values "$verb" "$prev")
        [[ -n $rows ]] || rows=$(_meshwright_values '*' "$prev")
        if [[ -n $rows ]] && [[ $cur != -* ]]; then
            _meshwright_offer "$rows"
            return
        fi
    fi
    if [[ $cur == --*.* ]]; then
        _meshwright_offer "$(_meshwright_keys "$verb")"
    elif [[ $cur == -* ]]; then
        rows=$(_meshwright_keys "$verb" | sed -E 's/^(--[a-z]+\.).*/\1/' | uniq)
        _meshwright_offer "$(_meshwright_flags "$verb")"$'\n'"$rows"
        [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace 2>/dev/null
    else
        _meshwright_offer "$(_meshwright_places "$verb")"
    fi
}

# Offer the first words of rows that begin with what is typed, and files.
_meshwright_offer() {
    local row word
    while IFS= read -r row; do
        word=${row%%$'\t'*}
        case $word in
        '') ;;
        @file) compopt -o filenames 2>/dev/null; mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$cur") ;;
        @folder) compopt -o filenames 2>/dev/null; mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -d -- "$cur") ;;
        "$cur"*) COMPREPLY+=("$word") ;;
        esac
    done <<<"$1"
}

complete -F _meshwright meshwright
